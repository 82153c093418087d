"""Runs a job under a constraint on a backend that takes masks while it runs: one job for the whole answer.

A thread, the guide, follows the tokens as they are chosen and gives the mask of the next one, while the backend
computes what comes before that choice. Where it is late, the backend waits. For other backends there is constrained.py;
both choose the same tokens.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from monotape.backends.protocol import (
    Bits,
    FinishReason,
    Job,
    KvSequence,
    MaskedGeneration,
    TakesMasks,
    Token,
    drafts_of,
)
from monotape.engine.constraint import Constraint, only, without
from monotape.engine.naps import end_naps_on_time


class GuidedGeneration:
    """A Generation whose every token passed the constraint. Dropping it, or its iterator, cancels it."""

    def __init__(
        self, backend: TakesMasks, job: Job, sequence: KvSequence, constraint: Constraint, vocab: int
    ) -> None:
        self._constraint = constraint
        self._cancelled = False
        self._generation = backend.start_masked(job, sequence)
        # The guide does not know this object: its thread would keep a dropped one alive.
        self._guide = _Guide(self._generation, job, constraint, vocab)
        self._thread = threading.Thread(target=self._guide.run, name="guide", daemon=True)
        self._thread.start()

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._generation.finish_reason

    @property
    def start_ns(self) -> int:
        return self._generation.start_ns

    @property
    def filled(self) -> int:
        return self._generation.filled

    @property
    def drafted(self) -> int:
        return drafts_of(self._generation)[0]

    @property
    def accepted(self) -> int:
        return drafts_of(self._generation)[1]

    def __iter__(self) -> Iterator[Token]:
        try:
            yield from self._generation
        finally:
            self._dismiss_guide()
        error, self._guide.error = self._guide.error, None
        if error is not None and not self._cancelled:  # a constraint that is cancelled may fail
            raise error

    def cancel(self) -> None:
        self._cancelled = True
        self._generation.cancel()
        self._constraint.cancel()

    def _dismiss_guide(self) -> None:
        """From here on nothing asks the constraint, which may be another text's next."""
        if self._generation.finish_reason not in ("stop", "length"):  # it may be at work
            self._generation.end_masks(complete=False)
            self._constraint.cancel()
        self._thread.join()

    def __del__(self) -> None:
        if hasattr(self, "_thread") and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                if self._thread.is_alive():
                    self.cancel()
                    self._thread.join()


class _Guide:
    """Gives a mask for every token; an error of the constraint's ends the job, and is kept."""

    def __init__(self, generation: MaskedGeneration, job: Job, constraint: Constraint, vocab: int) -> None:
        self._generation, self._job, self._constraint, self._vocab = generation, job, constraint, vocab
        self._given = 0  # masks
        self.error: Exception | None = None

    def run(self) -> None:
        end_naps_on_time()  # a token of a small model takes a few hundred microseconds
        try:
            self._follow()
        except Exception as error:
            self.error = error
            self._generation.end_masks(complete=False)

    def _follow(self) -> None:
        """Until the text is complete or the job ends.

        What the constraint forces is known before it is chosen: the next question is asked at once, and its answer has
        the time of several tokens, which a pass may compute together.
        """
        going_on = True
        while going_on:
            if forced := self._forced():
                going_on = all(self._force(forced[index:]) for index in range(len(forced)))
            else:
                going_on = self._offer(self._constraint.allowed()) and self._follow_choice()

    def _forced(self) -> list[int]:
        """None where log-probabilities are requested, as constrained.py has it: both choose the same tokens."""
        return self._constraint.forced() if self._job.logprobs is None else []

    def _force(self, ids: list[int]) -> bool:
        """The first of these tokens is the next one; the others will follow it."""
        self._generation.expect(ids)
        self._constraint.accept(ids[0])
        return self._offer(only(ids[0], self._vocab)) and not self._is_last(ids[0])

    def _follow_choice(self) -> bool:
        token_id = self._generation.await_token(self._given - 1)
        if token_id is None or self._is_last(token_id):
            return False
        self._constraint.accept(token_id)
        return True

    def _offer(self, bits: Bits) -> bool:
        """Gives the next mask. False: there will be no token of it."""
        ahead = self._generation.masks_ahead
        if self._given >= ahead and self._generation.await_token(self._given - ahead) is None:
            return False
        if self._given < self._job.min_tokens:
            bits = without(bits, self._job.stop_ids)
        if not bits.any():
            self._generation.end_masks(complete=True)
            return False
        self._generation.allow(bits)
        self._given += 1
        return True

    def _is_last(self, token_id: int) -> bool:
        """Whether the job ends with the token that the latest mask is about."""
        return token_id in self._job.stop_ids or self._given == self._job.max_tokens
