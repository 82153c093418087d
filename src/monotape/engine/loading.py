"""From a checkpoint to a backend that can run it: choose the format and the machine, plan, check memory, load."""

from __future__ import annotations

from pathlib import Path

from monotape.backends.protocol import Backend
from monotape.compiler.compile import compile_plan
from monotape.compiler.split import lanes_for
from monotape.errors import BackendUnavailable, ResourceError, UsageError, nearest
from monotape.models.spec import ModelSpec
from monotape.plan.types import Format, Machine, Plan
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
    if name not in BACKENDS:
        raise UsageError(
            f"There is no backend '{name}'.",
            f"Did you mean '{nearest(name, BACKENDS)}'? Known: {', '.join(BACKENDS)}.",
        )
    if name == "cuda":
        if DTYPES.get(dtype, Format.BF16) is not Format.BF16 or workers is not None:
            raise UsageError(
                "The CUDA backend runs bf16 on all multiprocessors.", "Leave out --dtype and --workers."
            )
        _require_one_gpu(lanes_for(spec, tp).count, emulate_ranks)
        return _load_cuda(spec, checkpoint, context, progress)
    plan = plan_for(spec, checkpoint, dtype=dtype, context=context, workers=workers, tp=tp)
    if name != "reference":
        try:
            return _load_cpu(spec, plan, checkpoint, progress)
        except BackendUnavailable as error:
            if name != "auto":
                raise
            _warn_about_reference(error)
    return _load_reference(spec, plan, checkpoint)


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


def _require_one_gpu(ranks: int, emulated: bool) -> None:
    if ranks == 1:
        return
    raise BackendUnavailable(
        f"The CUDA backend runs one rank yet, and {ranks} were asked for"
        + (" of one GPU." if emulated else "."),
        "Use --backend cpu, where ranks are groups of threads, or leave out --tp.",
    )


def choose_format(dtype: str, spec: ModelSpec, checkpoint: Checkpoint) -> Format:
    """The format on the tapes. "auto" keeps float weights exactly as stored; quantised files become q8."""
    if dtype != "auto":
        if dtype not in DTYPES:
            known = ("auto", *DTYPES)
            raise UsageError(f"There is no dtype '{dtype}'.", f"Did you mean '{nearest(dtype, known)}'?")
        return DTYPES[dtype]
    stored = {
        checkpoint.stored_as(tensor_name(source_of(spec, role, layer), layer))
        for layer in range(spec.layers)
        for role in _MATRICES
    }
    if stored == {"bf16"} or stored == {"f16"}:
        return DTYPES[stored.pop()]
    return Format.F32 if stored <= {"f32", "f16", "bf16"} else Format.Q8


def _load_cpu(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None) -> Backend:
    from monotape.backends.cpu.backend import CpuBackend
    from monotape.backends.cpu.bridge import library

    library()  # a machine that cannot run it should say so before the weights are read
    _require_memory(plan.weight_bytes)
    return CpuBackend.load(spec, plan, checkpoint, progress)


def _load_cuda(spec: ModelSpec, checkpoint: Checkpoint, context: int, progress: Progress | None) -> Backend:
    from monotape.backends.cuda.backend import CudaBackend
    from monotape.backends.cuda.driver import processors

    return CudaBackend.load(spec, gpu_plan(spec, processors(), context), checkpoint, progress)


def gpu_plan(spec: ModelSpec, workers: int, context: int, tp: int | None = None) -> Plan:
    """The plan for a GPU: 32 values along k at a time, heads finished by whoever attends to them.

    `workers` are those of one rank.
    """
    machine = Machine("cuda", workers, alignment=128, k_block=32, whole_heads=False)
    return compile_plan(spec, machine, Format.BF16, context=context, ranks=tp)


def _load_reference(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint) -> Backend:
    from monotape.backends.reference.backend import ReferenceBackend
    from monotape.backends.reference.weights import load_weights

    _require_memory(4 * spec.parameters)
    return ReferenceBackend(spec, plan, load_weights(spec, checkpoint), plan.context)


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
