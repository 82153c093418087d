"""From a model's name to something that runs: found, opened, checked, planned, loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monotape.backends.protocol import Backend
from monotape.compiler.split import lanes_for
from monotape.engine.config import EngineConfig
from monotape.engine.loading import load_backend
from monotape.engine.progress import progress_bar
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import UsageError
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.weights.check import check_tensors
from monotape.weights.hub import resolve
from monotape.weights.open import open_checkpoint

_CONTEXT_STEP = 256  # an automatic context is a multiple of this


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine needs of a model."""

    backend: Backend
    tokenizer: Tokenizer | None
    chat_template: str | None
    generation_config: Mapping[str, Any]
    context: int


def load(config: EngineConfig) -> Loaded:
    """Loads the model that the configuration names."""
    checkpoint = open_checkpoint(resolve(config.model, config.progress))
    spec = spec_from_config(checkpoint.config)
    check_tensors(spec, checkpoint)
    context = context_for(config, spec)
    tokenizer = Tokenizer.from_assets(checkpoint.text)
    with progress_bar(config.progress) as report:
        backend = load_backend(
            config.backend, spec, checkpoint,
            dtype=config.dtype, context=context, workers=config.workers, tp=config.tp,
            emulate_ranks=config.emulate_ranks, progress=report,
        )  # fmt: skip
    return Loaded(backend, tokenizer, checkpoint.text.chat_template, checkpoint.generation_config, context)


def context_for(config: EngineConfig, spec: ModelSpec) -> int:
    """The context to plan for: what was asked for, or as much of the model's as memory allows for its KV."""
    if config.max_model_len is not None:
        if config.max_model_len > spec.context:
            raise UsageError(
                f"max_model_len is {config.max_model_len}, but the model was made for {spec.context} tokens.",
                f"Use at most {spec.context}, or leave it out.",
            )
        return config.max_model_len
    kv_heads = max(spec.kv_heads, lanes_for(spec, config.tp).count)  # every rank has one at least
    position_bytes = (
        2 * spec.layers * kv_heads * spec.head_dim * 4
    )  # float32, the widest that any backend keeps
    fits = config.kv_budget // position_bytes
    if spec.context <= fits:
        return spec.context
    context = min(spec.context, max(_CONTEXT_STEP, fits // _CONTEXT_STEP * _CONTEXT_STEP))
    logging.getLogger("monotape").warning(
        "Using a context of %d of the model's %d tokens: the KV of all would take %.1f GiB. "
        "Set max_model_len to choose.",
        context, spec.context, spec.context * position_bytes / 2**30,
    )  # fmt: skip
    return context
