"""From a checkpoint to a backend that can run it: choose the format and the machine, plan, check memory, load."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from monotape.backends.protocol import Backend
from monotape.compiler.compile import compile_plan
from monotape.compiler.gpu import drafting_plan, gpu_plan
from monotape.compiler.split import lanes_for
from monotape.engine.asked import Asked, dtype_format, formats_for, packed_on_cores, require_kernels
from monotape.engine.config import may_use_gpu
from monotape.engine.devices import check_devices
from monotape.engine.formats import Chosen, has_kernels
from monotape.engine.memory import Need, require_memory
from monotape.errors import BackendUnavailable, UnsupportedModel, UsageError, did_you_mean
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.gpu import GpuPlan
from monotape.plan.gpu_machines import NEVER_RUN
from monotape.plan.types import Machine, Plan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.rounded import Cost, RoundedCheckpoint, sampled_cost
from monotape.weights.tapes import Progress

BACKENDS = ("auto", "cpu", "cuda", "hip", "reference")
GPU_BACKENDS = ("cuda", "hip")  # "auto" never chooses hip: it has not run on hardware


def load_backend(
    name: str,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    head_dtype: str = "auto",
    kv_dtype: str = "auto",
    context: int,
    least_context: int | None = None,
    workers: int | None = None,
    tp: int | None = None,
    emulate_ranks: bool = False,
    speculation: bool = True,
    progress: Progress | None = None,
) -> Backend:
    """Loads the model onto the named backend; "auto" takes the fastest one this machine has.

    `tp`: ranks; None takes as many as the model has lanes, else one. `emulate_ranks` lets ranks share a GPU; on a CPU
    they always share the machine. `least_context`: positions for which a CPU's memory must suffice, where the
    context is a default. `speculation`: a pass may check drafts, where backend and model can do that. The dtypes:
    formats.py and rounded.py say what each does.
    """
    ranks = lanes_for(spec, tp).count
    asked = Asked(dtype, head_dtype, kv_dtype)
    chosen = choose_backend(name, dtype, workers, ranks, emulate_ranks)
    if chosen == "cuda":
        try:
            return _load_cuda(
                spec, checkpoint, asked, context, workers, progress, ranks, emulate_ranks, speculation
            )
        except UnsupportedModel as error:
            if name != "auto":
                raise
            _note(f"{error.message} Using the CPU.")
    if chosen == "hip":
        return _load_hip(spec, checkpoint, asked, context, workers, progress, ranks, emulate_ranks)
    if chosen != "reference":
        try:
            return _load_cpu(spec, checkpoint, asked, context, least_context, workers, tp, progress)
        except BackendUnavailable as error:
            if name != "auto":
                raise
            _warn_about_reference(error)
    return _load_reference(spec, checkpoint, asked, context, least_context, workers, tp)


def choose_backend(
    name: str, dtype: str = "auto", workers: int | None = None, ranks: int = 1, emulate_ranks: bool = False
) -> str:
    """ "auto" is a Hopper GPU where there is one and it can do what was asked for, else the cores."""
    if name not in BACKENDS:
        raise UsageError(
            f"There is no backend '{name}'.",
            f"{did_you_mean(name, BACKENDS)}Known: {', '.join(BACKENDS)}.",
        )
    if name != "auto":
        require_kernels(name, dtype)
        return name
    fmt = dtype_format(dtype)
    if not may_use_gpu(name, dtype, workers) or not (fmt is None or has_kernels("cuda", fmt)):
        return "cpu"
    from monotape.backends.cuda.detection import why_not

    reason = why_not()
    if reason is None:
        reason = _why_not_ranks(ranks, emulate_ranks)
    if reason:
        _note(f"{reason} Using the CPU.")
    return "cuda" if reason is None else "cpu"


def planned(
    name: str, spec: ModelSpec, checkpoint: Checkpoint, *, dtype: str = "auto", head_dtype: str = "auto",
    kv_dtype: str = "auto", context: int, workers: int | None, tp: int | None = None,
) -> Plan | GpuPlan:  # fmt: skip
    """The plan that the named backend would run. With a number of workers it needs no GPU to be there."""
    asked = Asked(dtype, head_dtype, kv_dtype)
    backend = choose_backend(name, dtype, workers, lanes_for(spec, tp).count)
    _, formats = formats_for(backend, asked, spec, checkpoint, tp)
    _say(formats.notes)
    if backend not in GPU_BACKENDS:
        return cpu_plan(spec, formats, context=context, workers=workers, tp=tp)
    workers = _processors(backend) if workers is None else workers
    return gpu_plan(
        spec, workers, context, formats.default, tp, stage_formats=formats.of_stages, backend=backend,
        kv_format=formats.kv,
    )  # fmt: skip


def _processors(backend: str) -> int:
    """Of this machine's GPU."""
    if backend == "hip":
        from monotape.backends.hip.backend import processors as compute_units

        return compute_units()
    from monotape.backends.cuda.driver import processors

    return processors()


def cpu_plan(
    spec: ModelSpec, formats: Chosen, *, context: int, workers: int | None = None, tp: int | None = None
) -> Plan:
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
    return compile_plan(
        spec, machine, formats.default, context=context, ranks=tp, stage_formats=formats.of_stages,
        kv_format=formats.kv,
    )  # fmt: skip


def _why_not_ranks(ranks: int, emulated: bool) -> str | None:
    """Why this machine's GPUs cannot serve as the ranks; None if they can."""
    try:
        _require_gpus(ranks, emulated)
    except BackendUnavailable as error:
        return error.message
    return None


def _require_gpus(ranks: int, emulated: bool, vendor: str = "NVIDIA") -> None:
    if ranks == 1:
        return
    from monotape.backends.cuda.driver import can_reach, device_count

    check_devices(ranks, device_count(), can_reach, emulated=emulated, vendor=vendor)


def _load_cpu(
    spec: ModelSpec, checkpoint: Checkpoint, asked: Asked, context: int, least: int | None, workers: int | None,
    tp: int | None, progress: Progress | None,
) -> Backend:  # fmt: skip
    from monotape.backends.cpu.backend import CpuBackend
    from monotape.backends.cpu.bridge import library

    source, formats = formats_for("cpu", asked, spec, checkpoint, tp)
    plan = cpu_plan(spec, formats, context=context, workers=workers, tp=tp)
    library()  # a machine that cannot run it should say so before the weights are read
    others = _smaller(spec, checkpoint, asked, context, workers, tp)
    require_memory(Need.of(plan, least), available_memory(), others)
    _say(formats.notes)
    backend = CpuBackend.load(spec, plan, source, progress)
    _tell_costs(source)
    if packed := packed_on_cores(asked, spec, checkpoint, formats):
        _tell_cost(Format.Q8, sampled_cost(checkpoint, packed, Format.Q8), " by a sample of rows")
    return backend


def _load_cuda(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    asked: Asked,
    context: int,
    workers: int | None,
    progress: Progress | None,
    ranks: int,
    emulated: bool,
    speculation: bool,
) -> Backend:
    if workers is not None:
        raise UsageError(
            "The CUDA backend runs on all multiprocessors.", "Leave out --workers, or use --backend cpu."
        )
    source, formats = formats_for("cuda", asked, spec, checkpoint, ranks)
    _require_gpus(ranks, emulated)
    from monotape.backends.cuda.driver import processors

    workers = processors() // (ranks if emulated else 1)
    plan = gpu_plan(
        spec, workers, context, formats.default, ranks, stage_formats=formats.of_stages, kv_format=formats.kv
    )  # fmt: skip
    _say(formats.notes)
    backend: Backend
    if ranks > 1:
        from monotape.backends.cuda.ranked import RankedCudaBackend

        devices = [0] * ranks if emulated else list(range(ranks))
        backend = RankedCudaBackend.load(spec, plan, source, progress, devices=devices)
    elif speculation and (drafting := drafting_plan(spec, plan)):
        from monotape.backends.cuda.drafting import DraftingBackend

        backend = DraftingBackend.load_both(spec, plan, drafting, source, progress)
    else:
        from monotape.backends.cuda.backend import CudaBackend

        backend = CudaBackend.load(spec, plan, source, progress)
    _tell_costs(source)
    _tell_kv_cost(formats, spec, source)
    return backend


def _load_hip(
    spec: ModelSpec, checkpoint: Checkpoint, asked: Asked, context: int, workers: int | None,
    progress: Progress | None, ranks: int, emulated: bool,
) -> Backend:  # fmt: skip
    if ranks > 1 and emulated:
        raise UsageError(
            "The HIP backend has no emulated ranks: an AMD GPU runs one cooperative launch at a time.",
            "Leave out --emulate-ranks: each rank takes a GPU.",
        )
    if workers is not None:
        raise UsageError(
            "The HIP backend runs on all compute units.", "Leave out --workers, or use --backend cpu."
        )
    from monotape.backends.hip.backend import HipBackend, RankedHipBackend, use_hip

    source, formats = formats_for("hip", asked, spec, checkpoint, ranks)
    use_hip()
    _require_gpus(ranks, emulated, "AMD")
    plan = gpu_plan(
        spec,
        _processors("hip"),
        context,
        formats.default,
        ranks,
        stage_formats=formats.of_stages,
        backend="hip",
    )
    _say((*formats.notes, f"The HIP backend is {NEVER_RUN}: please send us what `make test-hip` reports."))
    backend: Backend
    if ranks > 1:
        backend = RankedHipBackend.load(spec, plan, source, progress, devices=range(ranks))
    else:
        backend = HipBackend.load(spec, plan, source, progress)
    _tell_costs(source)
    return backend


def _load_reference(
    spec: ModelSpec, checkpoint: Checkpoint, asked: Asked, context: int, least: int | None, workers: int | None,
    tp: int | None,
) -> Backend:  # fmt: skip
    """It computes in float32 whatever the format, with the numbers that the weights stand for."""
    from monotape.backends.reference.backend import ReferenceBackend
    from monotape.backends.reference.weights import load_weights

    source, formats = formats_for("reference", asked, spec, checkpoint, tp)
    plan = cpu_plan(spec, formats, context=context, workers=workers, tp=tp)
    position = sum(8 * rank.kv.layers * rank.kv.kv_heads * rank.kv.head_dim for rank in plan.ranks)
    need = Need(4 * spec.parameters, position, plan.context, least)
    require_memory(need, available_memory(), [("Use --backend cpu", Need.of(plan))])
    backend = ReferenceBackend(spec, plan, load_weights(spec, source), plan.context)
    _tell_costs(source)
    _tell_kv_cost(formats, spec, source)
    return backend


def _tell_costs(source: Checkpoint) -> None:
    """What rounding at load has cost."""
    if not isinstance(source, RoundedCheckpoint):
        return
    for fmt, cost in source.costs.items():
        _tell_cost(fmt, cost)


def _tell_cost(fmt: Format, cost: Cost, how: str = "") -> None:
    logging.getLogger("monotape").warning(
        "Rounded %s weights to %s at load: %.2f bits a weight, relative error %.2f %%%s.",
        f"{cost.values:,}", fmt.value, cost.bits_per_weight, 100 * cost.relative_error, how,
    )  # fmt: skip


def _tell_kv_cost(formats: Chosen, spec: ModelSpec, source: Checkpoint) -> None:
    """What keeping KV in fewer bits costs, where that was asked for."""
    if formats.kv is None:
        return
    from monotape.backends.reference.narrow_kv import first_layer_errors

    keys, values = first_layer_errors(spec, source)
    logging.getLogger("monotape").warning(
        "Keys and values are kept as e4m3 with a power of two a head: %.2f bits a value, relative error %.2f %% of "
        "keys and %.2f %% of values, by the first layer of a sample of tokens.",
        8 + 8 / spec.head_dim, 100 * keys, 100 * values,
    )  # fmt: skip


def _say(notes: Iterable[str]) -> None:
    for note in notes:
        _note(note)


@cache
def _note(text: str) -> None:
    """Says it once."""
    logging.getLogger("monotape").warning("%s", text)


def _warn_about_reference(error: BackendUnavailable) -> None:
    import warnings

    warnings.warn(f"{error.message} Falling back to the NumPy reference, which is slow.", stacklevel=3)


def _smaller(
    spec: ModelSpec, checkpoint: Checkpoint, asked: Asked, context: int, workers: int | None, tp: int | None
) -> Iterator[tuple[str, Need]]:
    """What the model needs on the cores with other types of weights, the most precise first."""
    for dtype in ("auto", "q8", "int4"):
        if dtype == asked.dtype:
            continue
        try:
            _, formats = formats_for("cpu", replace(asked, dtype=dtype), spec, checkpoint, tp)
        except UsageError:  # codes are not rounded again
            continue
        plan = cpu_plan(spec, formats, context=context, workers=workers, tp=tp)
        yield "Leave out --dtype" if dtype == "auto" else f"Use --dtype {dtype}", Need.of(plan)


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
