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
)
from monotape.engine.constraint import Constraint, only, without


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
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self.error = error
            self._generation.end_masks(complete=False)

    def _follow(self) -> None:
        output: list[int] = []
        while True:
            for bits in self._next():
                if len(output) < self._job.min_tokens:
                    bits = without(bits, self._job.stop_ids)
                if not bits.any():
                    return self._generation.end_masks(complete=True)
                self._generation.allow(bits)
                token_id = self._generation.await_token(len(output))
                if token_id is None:
                    return
                output.append(token_id)
                if token_id in self._job.stop_ids or len(output) == self._job.max_tokens:
                    return
                self._constraint.accept(token_id)

    def _next(self) -> list[Bits]:
        """The masks of the next tokens: of each that is forced, or one that leaves a choice.

        Where log-probabilities are requested nothing is forced: constrained.py has it so.
        """
        forced = self._constraint.forced() if self._job.logprobs is None else []
        return [only(token_id, self._vocab) for token_id in forced] or [self._constraint.allowed()]
