"""A model without weights that says when its jobs began: for bench/server_share.py.

It answers with the monotonic clock in nanoseconds: that of the start of this job, and that at which the job before it
learned that it was cancelled. A prompt that ends with "wait" is never answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from monotape.backends.protocol import Job, KvSequence
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.tokenizer import Tokenizer
from monotape.server.engine import model_source
from monotape.server.engine.model_source import Text
from token_source import SourceGeneration, SourceSequence, TokenSource

CONTEXT = 140_000


class CountingSequence(SourceSequence):
    """KV of which only the length counts, so that nothing here takes longer for a longer prompt."""

    def __init__(self) -> None:
        super().__init__(token_bytes=1)
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def bytes(self) -> int:
        return self._length

    def truncate(self, length: int) -> None:
        self._length = length

    def fill(self, length: int) -> None:
        self._length = length

    def copy_from(self, other: KvSequence, length: int) -> None:
        self._length = length


class ClockGeneration(SourceGeneration):
    """Its tokens are digits."""

    def _run(self):  # type: ignore[no-untyped-def]
        source, job = self.source, self.job
        assert isinstance(source, ClockSource) and isinstance(self.sequence, CountingSequence)
        ids: Sequence[int] = source.answer_ids
        if source.waits(job):
            self.cancelled.wait()
            source.cancelled_ns = time.monotonic_ns()
            self.finish_reason = "cancelled"
            return
        self.sequence.fill(len(job.prompt))
        for index, token_id in enumerate(ids[: job.max_tokens]):
            last = index == min(len(ids), job.max_tokens) - 1
            self.finish_reason = "length" if last else None
            yield source.token(token_id, time.monotonic_ns(), None)


class ClockSource(TokenSource):
    name = "clock"

    def __init__(self, tokenizer: Tokenizer | None, vocab: int) -> None:
        super().__init__(vocab=vocab, context=CONTEXT)
        self._tokenizer = tokenizer
        self.cancelled_ns = self.began_ns = 0
        self.answer_ids: list[int] = [0]
        self._waits = () if tokenizer is None else tuple(tokenizer.encode("wait", add_special=False))

    def waits(self, job: Job) -> bool:
        tail = tuple(job.prompt[-24:])
        size = len(self._waits)
        return size > 0 and any(tail[at : at + size] == self._waits for at in range(len(tail) - size + 1))

    def new_sequence(self) -> CountingSequence:
        return CountingSequence()

    def start(self, job: Job, sequence: KvSequence) -> ClockGeneration:
        self.began_ns = time.monotonic_ns()
        assert isinstance(sequence, CountingSequence)
        if self._tokenizer is not None:
            said = f"{self.began_ns} {self.cancelled_ns}"
            self.answer_ids = self._tokenizer.encode(said, add_special=False)
        return ClockGeneration(self, job, sequence)


def load_text(config: EngineConfig) -> Text:
    return model_source.load_text(config)


def load_llm(config: EngineConfig, phase: Callable[[str], None]) -> LLM:
    text = model_source.load_text(config)
    assert text.tokenizer is not None
    source = ClockSource(text.tokenizer, text.tokenizer.size + 64)
    return LLM.from_parts(source, context=CONTEXT, tokenizer=text.tokenizer, config=config)
