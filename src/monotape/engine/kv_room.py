"""How many bytes of keys and values may be kept, and how many a position takes. Both together decide the context."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from monotape.compiler.split import lanes_for
from monotape.engine.asked import Asked, formats_for
from monotape.engine.config import EngineConfig
from monotape.engine.loading import GPU_BACKENDS, choose_backend
from monotape.errors import MonotapeError
from monotape.models.spec import ModelSpec
from monotape.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Bytes, of all ranks together."""

    budget: int
    position: int


def kv_room_for(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint) -> KvRoom:
    """The configured budget, or a share of the memory that will hold the KV."""
    ranks = lanes_for(spec, config.tp).count
    chosen = choose_backend(config.backend, config.dtype, config.workers, ranks, config.emulate_ranks)
    if chosen in GPU_BACKENDS:
        try:
            return _on_gpus(chosen, ranks, config, spec, checkpoint)
        except MonotapeError:  # loading will say it, or take the cores
            pass
    return room_in_memory(config, spec)


def room_in_memory(config: EngineConfig, spec: ModelSpec) -> KvRoom:
    """Of the machine's own memory, whichever backend it will be."""
    kv_heads = max(spec.kv_heads, lanes_for(spec, config.tp).count)  # every rank has one at least
    # Float32 is the widest that any backend keeps. In 8 bits keys are padded to 32 values, and a power of two follows.
    narrow = config.kv_dtype != "auto" and config.backend != "reference"
    head_bytes = -(-spec.head_dim // 32) * 32 + 1 if narrow else 4 * spec.head_dim
    return KvRoom(config.kv_budget, 2 * spec.layers * kv_heads * head_bytes)


def _on_gpus(
    chosen: str, ranks: int, config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint
) -> KvRoom:
    """What weights and kernels of the plan leave on the GPU that has the least left for each of its ranks."""
    if chosen == "hip":
        from monotape.backends.hip.backend import use_hip

        use_hip()
    import monotape.backends.cuda.backend  # noqa: F401  -- all of it, while the driver makes the context
    from monotape.backends.cuda.driver import memory_free_and_total, on_device, processors
    from monotape.backends.cuda.memory import memory_plan
    from monotape.compiler.gpu import drafting_plan, gpu_plan

    _, formats = formats_for(
        chosen, Asked(config.dtype, config.head_dtype, config.kv_dtype), spec, checkpoint, config.tp
    )
    devices = [0] * ranks if config.emulate_ranks else list(range(ranks))
    plan = gpu_plan(
        spec, processors() // (ranks // len(set(devices))), min(config.max_model_len or spec.context, spec.context),
        formats.default, ranks, stage_formats=formats.of_stages, backend=chosen, kv_format=formats.kv,
    )  # fmt: skip
    drafting = drafting_plan(spec, plan) if config.speculation and ranks == 1 else None
    needed = [memory_plan(plan, rank, drafting) for rank in range(ranks)]
    left = []
    for device, sharing in Counter(devices).items():
        fixed = sum(
            need.total - need.kv for need, index in zip(needed, devices, strict=True) if index == device
        )
        with on_device(device):
            left.append((memory_free_and_total()[0] - fixed) // sharing)
    # Half of it: the other half is for the conversation that is going on, and grows.
    budget = ranks * max(0, min(left)) // 2 if config.kv_bytes is None else config.kv_bytes
    return KvRoom(budget, sum(need.kv_per_position for need in needed))
