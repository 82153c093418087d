"""The precision that a user asks for, and what it makes of a checkpoint: formats of the tapes, matrices to round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from monotape.engine.formats import (
    FLOATS,
    Chosen,
    cpu_formats,
    gpu_formats,
    has_kernels,
    head_format,
    mixes,
    stage_tensors,
)
from monotape.errors import UsageError, did_you_mean
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.gpu_machines import GPU_MACHINES
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.rounded import WAYS, RoundedCheckpoint
from monotape.weights.sorted_columns import with_sorted_columns

DTYPES = {
    "f32": Format.F32, "float32": Format.F32, "f16": Format.F16, "float16": Format.F16, "half": Format.F16,
    "bf16": Format.BF16, "bfloat16": Format.BF16, "q8": Format.Q8, "int8": Format.Q8,
    "fp8": Format.FP8, "int4": Format.INT4_G128,
}  # fmt: skip
KV_DTYPES = {"auto": None, "fp8": Format.FP8}
NARROW_KV = ("cuda", "reference")  # backends that keep KV in 8 bits
#: Stored formats that are of the kind that a dtype names: they are left as they are.
_SAME_KIND = {Format.FP8: ("fp8",), Format.INT4_G128: ("int4", "q4_0"), Format.Q8: ("q8_0",)}


@dataclass(frozen=True, slots=True)
class Asked:
    """Names as a user gives them. "auto": as the checkpoint stores it.

    A name of floats, and on a CPU q8, is for the head too unless that has a name of its own; fp8 and int4 are for the
    layers.
    """

    dtype: str = "auto"
    head_dtype: str = "auto"
    kv_dtype: str = "auto"


def dtype_format(dtype: str, option: str = "dtype") -> Format | None:
    """The format that a name stands for; None for "auto"."""
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        known = ("auto", *DTYPES)
        raise UsageError(
            f"There is no {option} '{dtype}'.", f"{did_you_mean(dtype, known)}Known: {', '.join(known)}."
        )
    return DTYPES[dtype]


def require_kernels(backend: str, dtype: str, option: str = "dtype") -> None:
    """Refuses a format that the backend does not run. The reference runs all of them."""
    fmt = dtype_format(dtype, option)
    if fmt is None or backend == "reference" or has_kernels(backend, fmt):
        return
    others = [name for name in ("cuda", "cpu") if has_kernels(name, fmt)]
    flag = f"--{option.replace(' ', '-')}"
    raise UsageError(
        f"The {backend} backend has no kernels for {dtype} weights.",
        f"Leave out {flag}" + (f", or use --backend {others[0]}." if others else "."),
    )


def formats_for(
    backend: str, asked: Asked, spec: ModelSpec, checkpoint: Checkpoint, ranks: int | None = None
) -> tuple[Checkpoint, Chosen]:
    """The checkpoint to load, rounded or sorted where that is asked for, and the formats of all stages."""
    fmt, head = dtype_format(asked.dtype), dtype_format(asked.head_dtype, "head dtype")
    require_kernels(backend, asked.dtype)
    require_kernels(backend, asked.head_dtype, "head dtype")
    _require_kv(backend, asked.kv_dtype)
    machine = backend if backend in GPU_MACHINES else "cpu"
    if head is not None and backend != "reference" and not mixes(machine):
        raise UsageError(
            f"The {backend} backend keeps the head in the format of the layers.", "Leave out --head-dtype."
        )
    uniform = fmt is not None and (fmt in FLOATS or (machine == "cpu" and fmt is Format.Q8))
    if backend != "reference" and not uniform:  # the reference adds in the order of the file
        checkpoint = with_sorted_columns(spec, checkpoint)
    rounded = _to_round(spec, checkpoint, None if uniform else fmt, head)
    source = _rounded(checkpoint, rounded)
    if uniform:
        assert fmt is not None
        chosen = Chosen(fmt, {"router": Format.F32} if spec.experts and fmt is Format.Q8 else {})
        if head is not None and head not in FLOATS:
            head = head_format(machine, spec, source)
    else:
        on_gpu = machine != "cpu"
        of_head = head if head in FLOATS else None
        chosen = (
            gpu_formats(spec, source, ranks, machine, of_head)
            if on_gpu
            else cpu_formats(spec, source, ranks, of_head)
        )
        if backend != "reference":
            _require_codes(spec, fmt, chosen, asked.dtype)
    if mixes(machine) and head is not None and uniform:
        others = {name: of_stage for name, of_stage in chosen.of_stages.items() if name != "head"}
        chosen = replace(chosen, of_stages=others if head is chosen.default else {**others, "head": head})
    return source, replace(chosen, kv=KV_DTYPES[asked.kv_dtype])


def packed_on_cores(asked: Asked, spec: ModelSpec, checkpoint: Checkpoint, chosen: Chosen) -> list[str]:
    """Matrices that become q8 while a CPU's kernels pack them: that was asked for, or no format holds them."""
    if dtype_format(asked.dtype) is not Format.Q8:
        return list(chosen.packed)
    stages = stage_tensors(spec)
    stages.pop("router", None)
    if asked.head_dtype != "auto":
        stages.pop("head")
    names = [name for tensors in stages.values() for name in tensors]
    return [name for name in names if not checkpoint.stored_as(name).startswith(_SAME_KIND[Format.Q8])]


def _rounded(checkpoint: Checkpoint, formats: dict[str, Format]) -> Checkpoint:
    if not formats:
        return checkpoint
    from monotape.backends.cuda.stored import round_rows  # native code, which needs no GPU

    return RoundedCheckpoint(checkpoint, formats, round_rows)


def _to_round(
    spec: ModelSpec, checkpoint: Checkpoint, fmt: Format | None, head: Format | None
) -> dict[str, Format]:
    """The matrices to round, by name."""
    stages = stage_tensors(spec)
    of_head = stages.pop("head")
    stages.pop("router", None)  # a rounded router chooses other experts, and saves nothing
    layers = [name for names in stages.values() for name in names]
    return {
        **_of_kind(checkpoint, layers, fmt, "--dtype"),
        **_of_kind(checkpoint, of_head, head, "--head-dtype"),
    }


def _of_kind(
    checkpoint: Checkpoint, names: Iterable[str], fmt: Format | None, flag: str
) -> dict[str, Format]:
    """Those that are not stored in this kind of format yet. Weights that are codes of another kind are refused."""
    if fmt is None or fmt not in WAYS:
        return {}
    found = {}
    for name in names:
        stored = checkpoint.stored_as(name)
        if stored.startswith(_SAME_KIND[fmt]):
            continue
        if checkpoint.stored_matrix(name) is not None and fmt is not Format.Q8:
            raise UsageError(
                f"Tensor {name} is stored as {stored}: rounding it again would add one error to another.",
                f"Leave out {flag}, or use a 16-bit checkpoint of the model.",
            )
        found[name] = fmt
    return found


def _require_codes(spec: ModelSpec, fmt: Format | None, chosen: Chosen, dtype: str) -> None:
    """Rounding weights only to unpack them again would cost precision and save nothing."""
    if fmt is None or fmt in FLOATS:
        return
    for matrix in spec.layer:
        if matrix.writes != "choice" and chosen.of_stages.get(matrix.name, chosen.default) in FLOATS:
            raise UsageError(
                f"The matrix {matrix.name} cannot be read as {dtype}: its columns are stored or shared out in pieces "
                "that groups do not fit.",
                "Leave out --dtype, or use fewer ranks.",
            )


def _require_kv(backend: str, dtype: str) -> None:
    if dtype not in KV_DTYPES:
        raise UsageError(f"There is no KV dtype '{dtype}'.", f"Known: {', '.join(KV_DTYPES)}.")
    if dtype != "auto" and backend not in NARROW_KV:
        raise UsageError(
            f"The {backend} backend keeps keys and values in 16 bits or more, not in {dtype}.",
            "Leave out --kv-dtype; a Hopper GPU has it.",
        )
