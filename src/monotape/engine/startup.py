"""From a model's name to something that runs: found, opened, checked, planned, loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monotape.backends.protocol import Backend
from monotape.engine.config import EngineConfig
from monotape.engine.defaults import DefaultSampling, default_sampling
from monotape.engine.kv_room import KvRoom, kv_room_for
from monotape.engine.loading import load_backend
from monotape.engine.progress import progress_bar
from monotape.engine.tokenizer import Tokenizer
from monotape.engine.wake import wake
from monotape.errors import UsageError
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.weights.check import check_tensors
from monotape.weights.open import open_checkpoint
from monotape.weights.paths import local_path

_CONTEXT_STEP = 256  # an automatic context is a multiple of this


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine needs of a model."""

    backend: Backend
    tokenizer: Tokenizer | None
    chat_template: str | None
    generation_config: Mapping[str, Any]
    context: int
    kv_budget: int
    sampling: DefaultSampling
    source: str  # the file or folder


Phase = Callable[[str], None]  # called with the name of each phase when it has ended


def load(config: EngineConfig, phase: Phase = lambda name: None) -> Loaded:
    """Loads the model that the configuration names."""
    wake(config)
    path = local_path(config.model) or _fetched(config)
    phase("find the model")
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    check_tensors(spec, checkpoint)
    room = kv_room_for(config, spec, checkpoint)
    context = context_for(config, spec, room)
    phase("open and check the files")
    tokenizer = Tokenizer.from_assets(checkpoint.text)
    phase("tokenizer")
    with progress_bar(config.progress) as report:
        backend = load_backend(
            config.backend, spec, checkpoint,
            dtype=config.dtype, head_dtype=config.head_dtype, kv_dtype=config.kv_dtype, context=context,
            least_context=None if config.max_model_len else min(context, _CONTEXT_STEP),
            workers=config.workers, tp=config.tp, emulate_ranks=config.emulate_ranks,
            speculation=config.speculation, progress=report,
        )  # fmt: skip
    phase("weights")
    generation = checkpoint.generation_config
    sampling = default_sampling(generation, _names(config.model, path, checkpoint.config))
    return Loaded(
        backend, tokenizer, checkpoint.text.chat_template, generation, context, room.budget, sampling,
        checkpoint.source,
    )  # fmt: skip


def _names(model: str, path: Path, config: Mapping[str, Any]) -> list[str]:
    """What the model is called. Of a path only its end counts, and the folder of the hub's cache that it is in."""
    named = [path.name, Path(str(config.get("_name_or_path", ""))).name]
    named += [part for part in path.parts if part.startswith("models--")]
    return named if local_path(model) else [model, *named]


def _fetched(config: EngineConfig) -> Path:
    from monotape.weights.hub import resolve  # all that speaks with a hub, which a path does not need

    return resolve(config.model, config.progress)


def context_for(config: EngineConfig, spec: ModelSpec, room: KvRoom) -> int:
    """The context to plan for: the configured one, or as much of the model's as the KV's memory allows."""
    if config.max_model_len is not None:
        if config.max_model_len > spec.context:
            raise UsageError(
                f"max_model_len is {config.max_model_len}, but the model was made for {spec.context} tokens.",
                f"Use at most {spec.context}, or leave it out.",
            )
        return config.max_model_len
    fits = room.budget // room.position
    if spec.context <= fits:
        return spec.context
    context = min(spec.context, max(_CONTEXT_STEP, fits // _CONTEXT_STEP * _CONTEXT_STEP))
    logging.getLogger("monotape").warning(
        "Using a context of %d of the model's %d tokens: the KV of all would take %.1f GiB. "
        "Set max_model_len (--max-model-len) to choose.",
        context, spec.context, spec.context * room.position / 2**30,
    )  # fmt: skip
    return context
