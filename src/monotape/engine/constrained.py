"""Runs a job under a constraint that decides before every choice which tokens may be chosen.

For backends that take no masks while they run; for others see guided.py. Each step is one pass of the backend that
gives logits, a mask that another thread works out meanwhile, and a choice by the sampler that defines choices. Where
the constraint leaves no choice, nothing is computed: such tokens go into the next pass together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import Backend, FinishReason, Generation, Job, KvSequence, Token
from monotape.backends.reference.sampler import choose, logprobs
from monotape.engine.constraint import Constraint, Mask, unpacked
from monotape.engine.kv_pool import RoomyBackend
from monotape.errors import NumericalFault, RequestError

Floats = NDArray[np.float32]


class ConstrainedGeneration:
    """A Generation whose every token passed the constraint; computed as it is read."""

    def __init__(
        self, backend: Backend | RoomyBackend, job: Job, sequence: KvSequence, constraint: Constraint
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.start_ns = time.monotonic_ns()
        self.accepted = 0  # tokens after the first that needed no pass of their own, since they were forced
        self._backend, self._job, self._sequence, self._constraint = backend, job, sequence, constraint
        self._cancelled = threading.Event()
        self._prefill: Generation | None = None
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    @property
    def drafted(self) -> int:
        """As where masks are hinted at: a forced token is a draft, which is always right."""
        return self.accepted

    @property
    def filled(self) -> int:
        given = self._sequence.length if self._prefill is None else self._prefill.filled
        return min(given, len(self._job.prompt))

    def cancel(self) -> None:
        self._cancelled.set()
        self._constraint.cancel()
        if (prefill := self._prefill) is not None:
            prefill.cancel()

    def _run(self) -> Iterator[Token]:
        output: list[int] = []
        pending = [self._job.prompt[-1]]  # chosen or given, but without KV yet
        with ThreadPoolExecutor(1, "mask") as beside:
            self._fill()
            while not self._over():
                try:
                    forced = self._forced()
                    tokens = forced or self._next(beside, pending, output)
                except RequestError:
                    if self._over():  # a cancelled constraint fails, and its result is not awaited
                        return
                    raise
                if not tokens:
                    self.finish_reason = "stop"  # complete: nothing may follow
                for token in tokens:
                    self.accepted += bool(forced and output)
                    output.append(token.id)
                    pending.append(token.id)
                    self.finish_reason = self._reason(output)
                    if self.finish_reason is None:
                        self._constraint.accept(token.id)
                    yield token
                    if self.finish_reason is not None:
                        break

    def _next(self, beside: ThreadPoolExecutor, pending: list[int], output: list[int]) -> list[Token]:
        """The next token; none when the text is complete. A pass computes all pending ones."""
        mask = beside.submit(self._constraint.allowed)
        logits = self._backend.logits(pending, self._sequence)[-1]
        pending.clear()
        return self._choose(logits, unpacked(mask.result(), len(logits)), output)

    def _over(self) -> bool:
        if self.finish_reason is None and self._cancelled.is_set():
            self.finish_reason = "cancelled"
        return self.finish_reason is not None

    def _fill(self) -> None:
        """Computes the KV of the prompt, its last token aside."""
        job = self._job
        self._sequence.truncate(job.cached)
        if job.cached >= len(job.prompt) - 1:
            return
        self._prefill = self._backend.start(Job(job.prompt[:-1], job.cached, 1), self._sequence)
        if self._cancelled.is_set():
            self._prefill.cancel()
        for _ in self._prefill:
            pass

    def _forced(self) -> list[Token]:
        """Tokens that must come next; none where log-probabilities are requested, which need a pass."""
        if self._job.logprobs is not None:
            return []
        return [Token(token_id, time.monotonic_ns()) for token_id in self._constraint.forced()]

    def _choose(self, logits: Floats, mask: Mask, output: list[int]) -> list[Token]:
        job = self._job
        position = len(job.prompt) + len(output)
        if not np.isfinite(logits).all():
            raise NumericalFault(
                f"The logits at position {position - 1} are not numbers.",
                "The weights or the prompt drive the model out of range; try --dtype f32.",
            )
        if len(output) < job.min_tokens:
            mask = mask.copy()
            mask[list(job.stop_ids)] = False
        if not mask.any():
            return []
        masked = np.where(mask, logits, np.float32(-np.inf))
        chosen = choose(masked, job.prompt, output, position, job.sampling)
        if job.logprobs is None:
            return [Token(chosen, time.monotonic_ns())]
        own, top = logprobs(logits, chosen, job.logprobs)
        return [Token(chosen, time.monotonic_ns(), own, top)]

    def _reason(self, output: list[int]) -> FinishReason | None:
        if output[-1] in self._job.stop_ids:
            return "stop"
        return "length" if len(output) == self._job.max_tokens else None
