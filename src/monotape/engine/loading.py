"""From a checkpoint to a backend that can run it: choose the format and the machine, plan, check memory, load."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from monotape.backends.protocol import Backend
from monotape.compiler.compile import compile_plan
from monotape.compiler.gpu import gpu_plan
from monotape.compiler.split import lanes_for
from monotape.engine.config import may_use_gpu
from monotape.engine.devices import check_devices
from monotape.errors import BackendUnavailable, ResourceError, UnsupportedModel, UsageError, nearest
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.gpu import GPU_FORMATS, GpuPlan
from monotape.plan.types import Machine, Plan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress, source_of, tensor_name

BACKENDS = ("auto", "cpu", "cuda", "reference")
DTYPES = {
    "f32": Format.F32, "float32": Format.F32, "f16": Format.F16, "float16": Format.F16, "half": Format.F16,
    "bf16": Format.BF16, "bfloat16": Format.BF16, "q8": Format.Q8, "int8": Format.Q8,
}  # fmt: skip
_MATRICES = ("q", "k", "v", "output", "gate", "up", "down")


def load_backend(
    name: str,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    context: int,
    workers: int | None = None,
    tp: int | None = None,
    emulate_ranks: bool = False,
    progress: Progress | None = None,
) -> Backend:
    """Loads the model onto the named backend; "auto" takes the fastest one this machine has.

    `tp`: ranks; None takes as many as the model has lanes, else one. `emulate_ranks` lets ranks share a GPU; on a CPU
    they always share the machine.
    """
    ranks = lanes_for(spec, tp).count
    chosen = choose_backend(name, dtype, workers, ranks, emulate_ranks)
    if chosen == "cuda":
        try:
            return _load_cuda(spec, checkpoint, dtype, context, workers, progress, ranks, emulate_ranks)
        except UnsupportedModel as error:
            if name != "auto":
                raise
            _note(f"{error.message} Using the CPU.")
    plan = plan_for(spec, checkpoint, dtype=dtype, context=context, workers=workers, tp=tp)
    if chosen != "reference":
        try:
            return _load_cpu(spec, plan, checkpoint, progress)
        except BackendUnavailable as error:
            if name != "auto":
                raise
            _warn_about_reference(error)
    return _load_reference(spec, plan, checkpoint)


def choose_backend(
    name: str, dtype: str = "auto", workers: int | None = None, ranks: int = 1, emulate_ranks: bool = False
) -> str:
    """ "auto" is a Hopper GPU where there is one and it can do what was asked for, else the cores."""
    if name not in BACKENDS:
        raise UsageError(
            f"There is no backend '{name}'.",
            f"Did you mean '{nearest(name, BACKENDS)}'? Known: {', '.join(BACKENDS)}.",
        )
    if name == "cuda":
        _require_gpu_dtype(dtype)
    if name != "auto":
        return name
    if not may_use_gpu(name, dtype, workers):
        return "cpu"
    from monotape.backends.cuda.detection import why_not

    reason = why_not()
    if reason is None:
        reason = _why_not_ranks(ranks, emulate_ranks)
    if reason:
        _note(f"{reason} Using the CPU.")
    return "cuda" if reason is None else "cpu"


def planned(
    name: str, spec: ModelSpec, checkpoint: Checkpoint, *, dtype: str, context: int, workers: int | None,
    tp: int | None = None,
) -> Plan | GpuPlan:  # fmt: skip
    """The plan that the named backend would run. With a number of workers it needs no GPU to be there."""
    if choose_backend(name, dtype, workers, lanes_for(spec, tp).count) != "cuda":
        return plan_for(spec, checkpoint, dtype=dtype, context=context, workers=workers, tp=tp)
    if workers is None:
        from monotape.backends.cuda.driver import processors

        workers = processors()
    fmt, of_stages = gpu_formats(dtype, spec, checkpoint)
    return gpu_plan(spec, workers, context, fmt, tp, stage_formats=of_stages)


def plan_for(
    spec: ModelSpec, checkpoint: Checkpoint, *, dtype: str, context: int, workers: int | None,
    tp: int | None = None,
) -> Plan:  # fmt: skip
    """The plan of this model on this machine's cores, which are shared out among the ranks."""
    from monotape.backends.cpu.bandwidth import available_cpus

    if workers is not None and not 1 <= workers <= 1024:
        raise UsageError(f"{workers} workers cannot be.", "Give a number from 1 to 1024, or leave it out.")
    ranks = lanes_for(spec, tp).count
    if workers is not None and workers % ranks:
        raise UsageError(
            f"{ranks} ranks cannot share {workers} workers evenly.",
            f"Give --workers a multiple of {ranks}, or leave it out.",
        )
    machine = Machine("cpu", max(1, (workers or available_cpus()) // ranks))
    return compile_plan(spec, machine, choose_format(dtype, spec, checkpoint), context=context, ranks=tp)


def _why_not_ranks(ranks: int, emulated: bool) -> str | None:
    """Why this machine's GPUs cannot serve as the ranks; None if they can."""
    try:
        _require_gpus(ranks, emulated)
    except BackendUnavailable as error:
        return error.message
    return None


def _require_gpus(ranks: int, emulated: bool) -> None:
    if ranks == 1:
        return
    from monotape.backends.cuda.driver import can_reach, device_count

    check_devices(ranks, device_count(), can_reach, emulated=emulated)


def choose_format(dtype: str, spec: ModelSpec, checkpoint: Checkpoint) -> Format:
    """The format on the tapes. "auto" keeps float weights exactly as stored; quantised files become q8."""
    if dtype != "auto":
        if dtype not in DTYPES:
            known = ("auto", *DTYPES)
            raise UsageError(f"There is no dtype '{dtype}'.", f"Did you mean '{nearest(dtype, known)}'?")
        return DTYPES[dtype]
    stored = _stored_formats(spec, checkpoint)
    if stored == {"bf16"} or stored == {"f16"}:
        return DTYPES[stored.pop()]
    return Format.F32 if stored <= {"f32", "f16", "bf16"} else Format.Q8


def _stored_formats(spec: ModelSpec, checkpoint: Checkpoint) -> set[str]:
    return {_stored(spec, checkpoint, role, layer) for layer in range(spec.layers) for role in _MATRICES}


def _stored(spec: ModelSpec, checkpoint: Checkpoint, role: str, layer: int | None) -> str:
    return checkpoint.stored_as(tensor_name(source_of(spec, role, layer), layer))


def _load_cpu(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None) -> Backend:
    from monotape.backends.cpu.backend import CpuBackend
    from monotape.backends.cpu.bridge import library

    library()  # a machine that cannot run it should say so before the weights are read
    _require_memory(plan.weight_bytes)
    return CpuBackend.load(spec, plan, checkpoint, progress)


def _load_cuda(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: str,
    context: int,
    workers: int | None,
    progress: Progress | None,
    ranks: int = 1,
    emulated: bool = False,
) -> Backend:
    if workers is not None:
        raise UsageError(
            "The CUDA backend runs on all multiprocessors.", "Leave out --workers, or use --backend cpu."
        )
    fmt, of_stages = gpu_formats(dtype, spec, checkpoint)
    _require_gpus(ranks, emulated)
    from monotape.backends.cuda.driver import processors

    workers = processors() // (ranks if emulated else 1)
    plan = gpu_plan(spec, workers, context, fmt, ranks, stage_formats=of_stages)
    if ranks > 1:
        from monotape.backends.cuda.ranked import RankedCudaBackend

        devices = [0] * ranks if emulated else list(range(ranks))
        return RankedCudaBackend.load(spec, plan, checkpoint, progress, devices=devices)
    from monotape.backends.cuda.backend import CudaBackend

    return CudaBackend.load(spec, plan, checkpoint, progress)


def gpu_formats(dtype: str, spec: ModelSpec, checkpoint: Checkpoint) -> tuple[Format, dict[str, Format]]:
    """The format of activations on a GPU, and of the stages whose tapes have another.

    "auto" keeps 16-bit weights exactly as they are stored, stage by stage; weights of other formats become bf16.
    """
    if dtype != "auto":
        _require_gpu_dtype(dtype)
        return choose_format(dtype, spec, checkpoint), {}
    stored = {
        matrix.name: {
            _stored(spec, checkpoint, role, layer) for role in matrix.parts for layer in range(spec.layers)
        }
        for matrix in spec.layer
    }
    stored["head"] = {_stored(spec, checkpoint, "embedding" if spec.tied else "head", None)}
    halves = {name: Format.F16 if kinds == {"f16"} else Format.BF16 for name, kinds in stored.items()}
    activations = (
        Format.F16 if all(halves[matrix.name] is Format.F16 for matrix in spec.layer) else Format.BF16
    )
    return activations, {name: fmt for name, fmt in halves.items() if fmt is not activations}


def _require_gpu_dtype(dtype: str) -> None:
    fmt = DTYPES.get(dtype)  # a name that means nothing is refused by choose_format
    if fmt is not None and fmt not in GPU_FORMATS:
        raise UsageError(
            f"The CUDA backend runs bf16 and f16 weights, not {fmt.value}.",
            "Leave out --dtype, or use --backend cpu.",
        )


def _load_reference(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint) -> Backend:
    from monotape.backends.reference.backend import ReferenceBackend
    from monotape.backends.reference.weights import load_weights

    _require_memory(4 * spec.parameters)
    return ReferenceBackend(spec, plan, load_weights(spec, checkpoint), plan.context)


@cache
def _note(text: str) -> None:
    """Says it once."""
    logging.getLogger("monotape").warning("%s", text)


def _warn_about_reference(error: BackendUnavailable) -> None:
    import warnings

    warnings.warn(f"{error.message} Falling back to the NumPy reference, which is slow.", stacklevel=3)


def _require_memory(needed: int) -> None:
    """Memory is planned before it is taken: too little is an error with the numbers, not a killed process."""
    available = available_memory()
    if available is not None and needed > available:
        raise ResourceError(
            f"The weights need {needed / 1e9:.2f} GB of memory and {available / 1e9:.2f} GB are available.",
            "Use --dtype q8, a smaller model, or free some memory.",
        )


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
