"""A backend without a model: it says what it is told by a clock of its own, and checks what the engine believes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookup import counted_drafts
from monotape.backends.protocol import Job, KvSequence, Token
from monotape.errors import NumericalFault
from token_source import SourceGeneration, SourceSequence, TokenSource

TICK_NS = 1_000_000  # the fake clock: a prefill takes one tick a token, so does every decoded token


class FakeBackend(TokenSource):
    """Says `script`, then its first token for ever. Stop ids are passed over until `min_tokens` are out."""

    name = "fake"

    def __init__(
        self,
        script: Sequence[int],
        *,
        vocab: int,
        context: int = 97,
        eos_id: int | None = None,
        token_bytes: int = 10,
    ) -> None:
        super().__init__(vocab=vocab, context=context, eos_id=eos_id, token_bytes=token_bytes)
        self.script = list(script)
        self.fault_at: int | None = None
        self.interrupt_at: int | None = None
        self.jobs: list[Job] = []
        self.prefilled: list[int] = []  # prompt tokens that each job had to compute
        self.generations: list[SourceGeneration] = []
        self.closed = False

    def answer(self, job: Job, index: int) -> int:
        script = self.script
        if index < job.min_tokens:
            script = [token for token in script if token not in job.stop_ids]
        return script[index] if index < len(script) else script[0]

    def drafts(self, job: Job, output: Sequence[int]) -> tuple[int, int]:
        return counted_drafts(job.prediction, output) if job.drafts else (0, 0)

    def wait(self, generation: SourceGeneration, index: int) -> None:
        if index < 0:
            self.prefilled.append(len(generation.job.prompt) - generation.job.cached)
        elif generation.cancelled.is_set():
            return
        elif index == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        elif index == self.fault_at:
            generation.sequence.tokens.append(-1)  # a fault leaves KV that must not be used
            raise NumericalFault("The logits at position 3 are not numbers.", "Nothing to be done.")

    def time_ns(self, generation: SourceGeneration, index: int) -> int:
        return generation.start_ns + TICK_NS * (len(generation.job.prompt) - generation.job.cached + index)

    def token(self, token_id: int, time_ns: int, top: int | None) -> Token:
        if top is None:
            return Token(token_id, time_ns)
        ranked = sorted({token_id, 1, 2, 3, 4, 5})  # the chosen one is not always among the most likely
        likely = tuple((other, -0.5 - rank) for rank, other in enumerate(ranked))
        return Token(token_id, time_ns, dict(likely)[token_id], likely[:top])

    def start(self, job: Job, sequence: KvSequence) -> SourceGeneration:
        assert isinstance(sequence, SourceSequence)
        assert not self.closed
        assert all(generation.finish_reason for generation in self.generations), "one job at a time"
        assert len(sequence.tokens) == job.cached, "the engine truncates before it starts"
        assert len(job.prompt) + job.max_tokens <= self.plan.context
        generation = super().start(job, sequence)
        generation.start_ns = 7 * TICK_NS
        self.jobs.append(job)
        self.generations.append(generation)
        return generation

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        """Logits that depend on the token and its position, so that a mixed-up row shows."""
        assert isinstance(sequence, SourceSequence)
        start = sequence.length
        sequence.tokens += tokens
        rows = [[(token * 31 + (start + row) * 17 + column * 7) % 23 / 4 for column in range(self.spec.vocab)]
                for row, token in enumerate(tokens)]  # fmt: skip
        return np.array(rows, np.float32)

    def close(self) -> None:
        self.closed = True
