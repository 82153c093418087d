"""A model that says its prompt again and again, a letter at a time and at a fixed rate: for bench/serve.py."""

from __future__ import annotations

import time
from collections.abc import Callable

from monotape.backends.protocol import Job
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.pieces import BYTE_OF_CHARACTER
from monotape.engine.tokenizer import Tokenizer
from monotape.server.engine.model_source import Text
from monotape.weights.checkpoint import TextAssets, Vocabulary
from token_source import SourceGeneration, TokenSource

CONTEXT = 131_072
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def expected(content: str, tokens: int) -> str:
    """The answer to one message, different for every message."""
    prompt = f"user: {content}\n"
    return (prompt * (tokens // len(prompt) + 1))[:tokens]


class EchoSource(TokenSource):
    """Every token at its time, counted from the first."""

    def __init__(self, rate: float) -> None:
        super().__init__(vocab=256, context=CONTEXT, token_bytes=0)
        self._rate, self._began = rate, 0.0

    def answer(self, job: Job, index: int) -> int:
        return job.prompt[index % len(job.prompt)]

    def wait(self, generation: SourceGeneration, index: int) -> None:
        if index <= 0:
            self._began = time.monotonic()
            return
        left = self._began + index / self._rate - time.monotonic()
        if left > 0:
            time.sleep(left)


def _tokenizer() -> Tokenizer:
    characters = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    vocabulary = Vocabulary(
        model="gpt2", pre="gpt-2", tokens=tuple(characters[byte] for byte in range(256)), types=(1,) * 256,
        scores=(), merges=(), add_bos=False, add_space_prefix=False, bos_id=None, eos_id=None, unknown_id=None,
    )  # fmt: skip
    tokenizer = Tokenizer.from_assets(TextAssets(vocabulary=vocabulary))
    assert tokenizer is not None
    return tokenizer


def load_text(config: EngineConfig) -> Text:
    return Text(_tokenizer(), TEMPLATE, {})


def load_llm(config: EngineConfig, phase: Callable[[str], None]) -> LLM:
    """The model's name is its rate: "rate-3000"."""
    backend = EchoSource(float(config.model.removeprefix("rate-")))
    return LLM.from_parts(
        backend, context=CONTEXT, tokenizer=_tokenizer(), chat_template=TEMPLATE, config=config
    )
