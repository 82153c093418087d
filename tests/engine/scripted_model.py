"""A whole model of the fake backend and the small vocabulary: it says its script and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.conversations import TEMPLATES
from engine.fake_backend import FakeBackend
from engine.vocabularies import byte_level
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.engine.tokenizer import Tokenizer
from monotape.weights.checkpoint import TextAssets

VOCABULARY = byte_level()
TOKENIZER = Tokenizer.from_assets(TextAssets(vocabulary=VOCABULARY))
VOCAB = len(VOCABULARY.tokens) + 3  # models pad their tables
END = VOCABULARY.tokens.index("<|end|>")
assert TOKENIZER is not None
ids_of: Callable[[str], list[int]] = TOKENIZER.encode
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def make(
    script: str | list[int] = "hello world", *, text: bool = True, **parts: Any
) -> tuple[LLM, FakeBackend]:
    """A model that says `script` and then ends."""
    context = parts.pop("context", 97)
    ids = [*ids_of(script), END] if isinstance(script, str) else script
    backend = FakeBackend(ids, vocab=VOCAB, context=context, eos_id=None)
    config = EngineConfig(**parts.pop("config", {}))
    parts.setdefault("chat_template", TEMPLATES["turn marks"])
    tokenizer = TOKENIZER if text else None
    return LLM.from_parts(backend, context=context, tokenizer=tokenizer, config=config, **parts), backend
