"""From a model's name to something that runs: found, opened, checked, planned, loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monotape.backends.protocol import Backend
from monotape.compiler.split import lanes_for
from monotape.engine.config import EngineConfig
from monotape.engine.defaults import DefaultSampling, default_sampling
from monotape.engine.loading import GPU_BACKENDS, choose_backend, load_backend
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
    kv_budget = kv_budget_for(config, spec)
    context = context_for(config, spec, kv_budget)
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
        backend, tokenizer, checkpoint.text.chat_template, generation, context, kv_budget, sampling,
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


def kv_budget_for(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes of KV that may be kept: the configured value, or a share of the memory that will hold the KV."""
    ranks = lanes_for(spec, config.tp).count
    chosen = choose_backend(config.backend, config.dtype, config.workers, ranks, config.emulate_ranks)
    if config.kv_bytes is not None or chosen not in GPU_BACKENDS:
        return config.kv_budget
    if chosen == "hip":
        from monotape.backends.hip.backend import use_hip

        use_hip()
    import monotape.backends.cuda.backend  # noqa: F401  -- all of it, while the driver makes the context
    from monotape.backends.cuda.driver import memory_free_and_total

    left = memory_free_and_total()[0] - 2 * spec.parameters
    return max(0, left) // 2  # the other half is for the conversation that is going on, and grows


def context_for(config: EngineConfig, spec: ModelSpec, kv_budget: int | None = None) -> int:
    """The context to plan for: the configured one, or as much of the model's as the KV's memory allows."""
    if config.max_model_len is not None:
        if config.max_model_len > spec.context:
            raise UsageError(
                f"max_model_len is {config.max_model_len}, but the model was made for {spec.context} tokens.",
                f"Use at most {spec.context}, or leave it out.",
            )
        return config.max_model_len
    kv_heads = max(spec.kv_heads, lanes_for(spec, config.tp).count)  # every rank has one at least
    # Float32 is the widest that any backend keeps. In 8 bits keys are padded to 32 values, and a power of two follows.
    narrow = config.kv_dtype != "auto" and config.backend != "reference"
    head_bytes = -(-spec.head_dim // 32) * 32 + 1 if narrow else 4 * spec.head_dim
    position_bytes = 2 * spec.layers * kv_heads * head_bytes
    fits = (config.kv_budget if kv_budget is None else kv_budget) // position_bytes
    if spec.context <= fits:
        return spec.context
    context = min(spec.context, max(_CONTEXT_STEP, fits // _CONTEXT_STEP * _CONTEXT_STEP))
    logging.getLogger("monotape").warning(
        "Using a context of %d of the model's %d tokens: the KV of all would take %.1f GiB. "
        "Set max_model_len (--max-model-len) to choose.",
        context, spec.context, spec.context * position_bytes / 2**30,
    )  # fmt: skip
    return context
