"""The reference backend: jobs run on the NumPy model, token by token, in the thread that asks for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import FinishReason, Job, KvSequence, Token
from monotape.backends.reference.model import ReferenceModel, ReferenceSequence
from monotape.backends.reference.sampler import choose, logprobs
from monotape.backends.reference.weights import ReferenceWeights
from monotape.errors import NumericalFault, RequestError, UsageError
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan

Floats = NDArray[np.float32]

PREFILL_ROWS = (
    128  # prompt tokens computed at a time: bounds the scores in memory and the wait for a cancellation
)


class ReferenceBackend:
    """Runs a model as its definition says; slow, exact, and the judge of the others."""

    def __init__(self, spec: ModelSpec, plan: Plan, weights: ReferenceWeights, context: int) -> None:
        if not 1 <= context <= spec.context:
            raise UsageError(
                f"A context of {context} was asked for, but this model has {spec.context} positions.",
                f"Ask for 1 to {spec.context}.",
            )
        self.name = "reference"
        self.spec = spec
        self.plan = plan
        self.context = context
        self._model: ReferenceModel | None = ReferenceModel(spec, plan, weights, context)

    def new_sequence(self) -> ReferenceSequence:
        return ReferenceSequence(self.plan)

    def start(self, job: Job, sequence: KvSequence) -> ReferenceGeneration:
        """Begins a job; its tokens are computed as they are asked for.

        All its room is reserved here: where memory is short, the engine can call again when other KV has given way.
        """
        self._check(job.prompt, len(job.prompt) + job.max_tokens - 1)
        if job.max_tokens < 1:
            raise RequestError(f"{job.max_tokens} tokens were asked for.", "Ask for at least one.")
        assert isinstance(sequence, ReferenceSequence), "a sequence belongs to the backend that made it"
        assert 0 <= job.cached < len(job.prompt), "at least one prompt token is left to compute"
        sequence.truncate(job.cached)
        sequence.reserve(len(job.prompt) + job.max_tokens)
        return ReferenceGeneration(self, job, sequence)

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> Floats:
        assert isinstance(sequence, ReferenceSequence), "a sequence belongs to the backend that made it"
        before = sequence.length
        self._check(tokens, before + len(tokens))
        sequence.reserve(before + len(tokens))
        try:
            parts = [
                self.step(tokens[start : start + PREFILL_ROWS], sequence, all_rows=True)
                for start in range(0, len(tokens), PREFILL_ROWS)
            ]
            return np.concatenate(parts)
        except MemoryError:  # the engine may call again with the same tokens
            sequence.truncate(before)
            raise

    def close(self) -> None:
        self._model = None

    def step(self, tokens: Sequence[int], sequence: ReferenceSequence, all_rows: bool = False) -> Floats:
        """One pass over a few rows: the logits after the last of them, or after each."""
        assert self._model is not None, "the backend is closed"
        start = sequence.length
        with np.errstate(all="ignore"):  # what matters of an overflow reaches the logits, and is named there
            hidden = self._model.hidden(tokens, sequence)
            logits = self._model.logits(hidden if all_rows else hidden[:, -1:])
            if np.isfinite(logits).all():
                return logits
            finite = np.isfinite(self._model.logits(hidden)).all(axis=-1)
        sequence.truncate(start)
        raise NumericalFault(
            f"The logits at position {start + int(np.argmin(finite))} hold NaN or infinity.",
            "The weights are damaged, or the activations left the range of float32.",
        )

    def _check(self, tokens: Sequence[int], positions: int) -> None:
        if not tokens:
            raise RequestError("The prompt is empty.", "Give at least one token.")
        for token in tokens:
            if not 0 <= token < self.spec.vocab:
                raise RequestError(
                    f"Token id {token} is not in the vocabulary of {self.spec.vocab}.",
                    "Use ids of this model's own tokenizer.",
                )
        if positions > self.context:
            raise RequestError(
                f"The request needs {positions} positions, but the context has {self.context}.",
                "Shorten the prompt, ask for fewer tokens, or load the model with a longer context.",
            )


class ReferenceGeneration:
    """A job under way: iterating computes it."""

    def __init__(self, backend: ReferenceBackend, job: Job, sequence: ReferenceSequence) -> None:
        self.finish_reason: FinishReason | None = None
        self.start_ns = time.perf_counter_ns()
        self._backend = backend
        self._job = job
        self._sequence = sequence
        self._cancelled = threading.Event()
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    @property
    def filled(self) -> int:
        return min(self._sequence.length, len(self._job.prompt))

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> Iterator[Token]:
        """Yields tokens until a stop id, the length or a cancellation ends it; so does leaving the loop."""
        output: list[int] = []
        try:
            logits = self._prefill()
            while logits is not None:
                token = self._next_token(logits, output)
                output.append(token.id)
                self.finish_reason = self._reason(output)
                yield token
                logits = self._advance(token.id)
        except GeneratorExit:
            self.finish_reason = self.finish_reason or "cancelled"
            raise

    def _prefill(self) -> Floats | None:
        """The logits after the prompt, or None when cancelled on the way."""
        logits = None
        for start in range(self._job.cached, len(self._job.prompt), PREFILL_ROWS):
            if self._cancelled.is_set():
                self.finish_reason = "cancelled"
                return None
            logits = self._backend.step(self._job.prompt[start : start + PREFILL_ROWS], self._sequence)[-1]
        return logits

    def _advance(self, token: int) -> Floats | None:
        """The logits after `token`, or None when it was the last; that one gets no KV."""
        if self.finish_reason is None and self._cancelled.is_set():
            self.finish_reason = "cancelled"
        return None if self.finish_reason else self._backend.step([token], self._sequence)[-1]

    def _next_token(self, logits: Floats, output: Sequence[int]) -> Token:
        job = self._job
        banned = job.stop_ids if len(output) < job.min_tokens else ()
        position = len(job.prompt) + len(output)
        chosen = choose(logits, job.prompt, output, position, job.sampling, banned)
        if job.logprobs is None:
            return Token(chosen, time.perf_counter_ns())
        own, top = logprobs(logits, chosen, job.logprobs)
        return Token(chosen, time.perf_counter_ns(), own, top)

    def _reason(self, output: Sequence[int]) -> FinishReason | None:
        if output[-1] in self._job.stop_ids:
            return "stop"
        return "length" if len(output) == self._job.max_tokens else None
