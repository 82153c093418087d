"""Where the server's two processes get the model from; tests and benchmarks put another module in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from monotape.engine.chat_template import read_template
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.startup import load
from monotape.engine.tokenizer import Tokenizer

LOG = logging.getLogger("monotape.server")


@dataclass(frozen=True, slots=True)
class Text:
    """Tokenizer and template, which turn requests into tokens in the server's own process."""

    tokenizer: Tokenizer | None
    template: str | None
    config: Mapping[str, Any]  # the checkpoint's tokenizer_config.json where there is one
    given: bool = False  # whether a user gave the template


def load_text(config: EngineConfig) -> Text:
    """Reads the tokenizer and the template, and nothing else of the model."""
    from monotape.weights.hub import described, resolve
    from monotape.weights.open import open_checkpoint

    checkpoint = open_checkpoint(resolve(config.model, config.progress))
    LOG.info("%s is %s", config.model, described(checkpoint.source))
    assets = checkpoint.text
    template = read_template(config.chat_template) if config.chat_template else assets.chat_template
    return Text(
        Tokenizer.from_assets(assets),
        template,
        assets.tokenizer_config or {},
        given=bool(config.chat_template),
    )


def load_llm(config: EngineConfig, phase: Callable[[str], None]) -> LLM:
    """Loads the model in the engine's process."""
    loaded = load(config, phase)
    return LLM.from_parts(
        loaded.backend,
        context=loaded.context,
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        generation_config=loaded.generation_config,
        config=config,
        sampling=loaded.sampling,
        source=loaded.source,
    )
