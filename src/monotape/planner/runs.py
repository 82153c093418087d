"""What Monotape runs today. The planner says so before it gives a speed for anything else."""

from __future__ import annotations

from monotape.models.registry import FAMILIES
from monotape.planner.box import Box
from monotape.planner.load import Load

CPU = "cpu"
HOPPER = ("h100", "h200")
RANKS = (1, 2, 4, 8)
_CPU_FORMATS = ("f32", "bf16", "fp16", "q8")
_GPU_FORMATS = ("bf16", "fp16")
_HALF, _SINGLE = 2.0, 4.0  # bytes of a KV value


def obstacles(load: Load, box: Box) -> tuple[str, ...]:
    """Why Monotape cannot run this model on these devices, a clause each; none where it can."""
    found = []
    device = box.gpu.name
    runs_there = device == CPU or device in HOPPER
    if not runs_there:
        found.append(f"it runs on NVIDIA Hopper GPUs and on CPUs, not on {box.gpu.label}")
    if load.shape.architecture not in FAMILIES:
        found.append(f"it does not run {load.shape.architecture}")
    return (*found, *_formats(load, box)) if runs_there else tuple(found)


def _formats(load: Load, box: Box) -> list[str]:
    found = []
    formats = _CPU_FORMATS if box.gpu.name == CPU else _GPU_FORMATS
    if load.precision.name not in formats:
        found.append(f"weights are kept as {' or '.join(formats)} there, not as {load.precision.name}")
    if load.kv_value_bytes != (_SINGLE if load.precision.name == "f32" else _HALF):
        found.append("KV is kept at 16 bits, or at 32 beside f32 weights")
    if box.count not in RANKS or (box.gpu.name == CPU and box.count > 1):
        found.append("it shares a model among 2, 4 or 8 GPUs, or the cores of one machine")
    return found
