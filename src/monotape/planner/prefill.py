"""How long a prompt takes: reading what is cached, and computing what is new at the speed that reports measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from monotape.errors import UsageError
from monotape.planner.box import MICRO, Box
from monotape.planner.compared import OWN, VLLM, PrefillSpeed, prefill_speed
from monotape.planner.engines import OWN_ENGINES, Engine, peak_flops
from monotape.planner.load import Load
from monotape.planner.runs import CPU

PREFILL_ROWS = 2048  # of one prefill pass of this engine on a GPU: ARCHITECTURE.md, Prefill
CPU_PREFILL_ROWS = 128


@dataclass(frozen=True, slots=True)
class Prefill:
    """How prompts are computed."""

    speed: PrefillSpeed
    rows: int = PREFILL_ROWS
    cache_bandwidth: float | None = None  # bytes a second, where cached KV lies outside the device's memory

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 1 << 20:
            raise UsageError(f"--prefill-rows {self.rows} makes no sense.", "Give 1 to 1048576.")
        if not 0 < self.speed.share <= 1:
            raise UsageError(
                f"--prefill-share {self.speed.share:g} is no share of the peak.", "Give a number like 0.6."
            )
        if self.cache_bandwidth is not None and not 0 < self.cache_bandwidth < 1e18:
            raise UsageError("--cache-bandwidth must be positive.", "Give GB/s, like 50.")


def prefill_for(
    engine: Engine,
    box: Box,
    *,
    rows: int | None = None,
    share: float | None = None,
    cache_bandwidth: float | None = None,
) -> Prefill:
    """Prompts as this engine was measured to compute them, any other as vLLM does; a share may be the user's own.

    A time a layer was measured on a GPU alone, and says nothing of a CPU.
    """
    on_cpu = box.gpu.name == CPU
    speed = prefill_speed(OWN if engine.name in OWN_ENGINES else VLLM)
    if share is not None:
        speed = replace(speed, share=share, source=f"your share; {speed.source}")
    if on_cpu:
        speed = replace(speed, layer_us=0.0)
    usual = CPU_PREFILL_ROWS if on_cpu else PREFILL_ROWS
    return Prefill(speed, usual if rows is None else rows, cache_bandwidth)


def prefill_assumption(prefill: Prefill, box: Box) -> str:
    """In words."""
    speed = prefill.speed
    reading = f"the reading of the weights for every {prefill.rows:,} tokens"
    reading += f" and {speed.layer_us:.0f} us a layer" if speed.layer_us else ""
    if box.gpu.bf16_tflops is None:
        return (
            f"prefill at {reading}; computing is not counted, because the planner knows no peak of {box.gpu.label}: it"
            " takes longer than that"
        )
    share = f"{100 * speed.share:.0f} % of the dense peak"
    return f"prefill at {share}, or at {reading}, whichever is slower ({speed.source})"


def prefill_seconds(load: Load, box: Box, cached: int, new: int, prefill: Prefill) -> tuple[float, float]:
    """(reading cached KV, computing new tokens): a pass reads the weights and all KV before it, or computes longer."""
    passes = -(-new // prefill.rows)
    bandwidth = box.count * box.best_bandwidth[0]
    if prefill.cache_bandwidth is not None:
        cached_bytes = load.shape.kv_stored_bytes(cached, load.kv_value_bytes)
        cache_s = cached_bytes / prefill.cache_bandwidth if cached else 0.0
    else:
        cache_s = passes * load.kv_read(cached) / bandwidth if cached else 0.0
    if not new:
        return cache_s, 0.0
    middle = cached + new // 2
    layers_s = len(load.shape.layers) * prefill.speed.layer_us * MICRO
    read_s = passes * (load.pass_bytes(0, min(new, prefill.rows)) / bandwidth + layers_s)
    rate = peak_flops(load, box, prefill.speed.share, fp8=prefill.speed.fp8)
    return cache_s, max(read_s, new * load.flops(middle) / rate)


def prefill_json(prefill: Prefill) -> dict[str, Any]:
    """For programs; a time a layer is in microseconds."""
    speed = prefill.speed
    return {
        "rows": prefill.rows, "share_of_peak": speed.share, "layer_us": speed.layer_us, "source": speed.source
    }  # fmt: skip
