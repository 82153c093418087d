"""What Monotape runs today. The planner says so before it gives a speed for anything else."""

from __future__ import annotations

from monotape.models.lanes import uneven_heads
from monotape.models.registry import FAMILIES
from monotape.plan.formats import LAYOUTS, Format
from monotape.plan.gpu_machines import NEVER_RUN
from monotape.planner.box import Box
from monotape.planner.load import Load

CPU = "cpu"
HOPPER = ("h100", "h200")
CDNA3 = ("mi300x", "mi325x")
MOST_GPUS = 8
#: Formats of tapes that hold weights of a precision, by the first word of its name; one that kernels read is enough.
_HELD_BY = {
    "f32": (Format.F32,), "bf16": (Format.BF16,), "fp16": (Format.F16,), "fp8": (Format.FP8_BLOCK,),
    "q8": (Format.Q8,), "int8": (Format.INT8, Format.WIDE), "int4": (Format.INT4_G32,),
    "mxfp4": (Format.MXFP4,), "nvfp4": (Format.WIDE,), "awq": (Format.INT4_G32Z,), "gptq": (Format.INT4_G32Z,),
}  # fmt: skip
_AS_STORED = "as stored"  # of a GGUF file; formats that no kernel reads are unpacked when it is loaded
_NARROW, _HALF, _SINGLE = 1.0, 2.0, 4.0  # bytes of a KV value


def obstacles(load: Load, box: Box) -> tuple[str, ...]:
    """Why Monotape cannot run this model on these devices, a clause each; none where it can."""
    found = []
    device = box.gpu.name
    runs_there = device == CPU or device in HOPPER
    if device in CDNA3:
        found.append(f"its kernel for {box.gpu.label} is {NEVER_RUN}")
    elif not runs_there:
        found.append(f"it runs on NVIDIA Hopper GPUs and on CPUs, not on {box.gpu.label}")
    if load.shape.architecture not in FAMILIES:
        found.append(f"it does not run {load.shape.architecture}")
    return (*found, *_formats(load, box)) if runs_there else tuple(found)


def _formats_of(name: str) -> tuple[Format, ...]:
    """Of formats of tapes too: they have their own names."""
    own = tuple(fmt for fmt in Format if fmt.value == name)
    return own or _HELD_BY.get(name.split()[0], ())


def _formats(load: Load, box: Box) -> list[str]:
    found = []
    name, layouts = load.precision.name, LAYOUTS["cpu" if box.gpu.name == CPU else "cuda"]
    if name != _AS_STORED and not any(fmt in layouts for fmt in _formats_of(name)):
        found.append(f"its kernels do not read {name} weights there")
    if load.kv_value_bytes == _NARROW and box.gpu.name in HOPPER:
        found.append(f"KV at 8 bits is {NEVER_RUN}")
    elif load.kv_value_bytes != (_SINGLE if load.precision.name == "f32" else _HALF):
        found.append("KV is kept at 16 bits, or at 32 beside f32 weights")
    return [*found, *_sharing(load, box)]


def _sharing(load: Load, box: Box) -> list[str]:
    if box.count > (1 if box.gpu.name == CPU else MOST_GPUS):
        return [f"it shares a model among up to {MOST_GPUS} GPUs, or the cores of one machine"]
    uneven = uneven_heads(*load.shape.heads, box.count) if load.shape.heads else ""
    return [f"{box.count} GPUs cannot share {uneven}"] if uneven else []
