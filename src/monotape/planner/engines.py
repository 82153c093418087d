"""How long a pass takes on an engine: the bytes at the machine's bandwidth, plus what the engine cannot hide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from monotape.errors import UsageError
from monotape.planner.box import MICRO, TERA, Box
from monotape.planner.catalogue import find_gpu, nearest_names, table
from monotape.planner.compared import versioned, vllm_layer_us, vllm_tokens
from monotape.planner.load import Load

ROWS_PER_PASS = (
    16  # sequences that one pass of this engine decodes together: the rows of a matrix instruction
)
PEAK_SHARE = (
    0.6  # of the dense peak that vLLM's large matrix products reach: compared.py has what was measured
)
SUMS_PER_LAYER = 2  # over all devices: after attention and after the feed-forward block
DEFAULT_ENGINE = "monotape"
OWN_ENGINES = (DEFAULT_ENGINE, "cpu")


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: a token for each row. The parts add up to `total_us`."""

    stream_us: float  # reading weights and KV
    exposed_us: float  # what the engine adds to that and cannot hide
    link_us: float  # sums over devices that nothing hides

    @property
    def total_us(self) -> float:
        return self.stream_us + self.exposed_us + self.link_us


@dataclass(frozen=True, slots=True)
class Engine:
    """A stack, as the time of its passes and the assumption behind it."""

    name: str
    title: str
    time: Callable[[Load, Box, int, int], Pass]  # context, rows
    assumption: Callable[[Load, Box], str]

    def pass_us(self, load: Load, box: Box, context: int, rows: int = 1) -> float:
        return self.time(load, box, context, rows).total_us


def stream_us(load: Load, box: Box, context: int, rows: int) -> float:
    return load.pass_bytes(context, rows) / (box.count * box.best_bandwidth[0]) / MICRO


def peak_flops(load: Load, box: Box, share: float = PEAK_SHARE, *, fp8: bool = True) -> float:
    """FLOPs a second in products of many rows. Announced chips and CPUs have no figure: there only reading counts.

    `fp8`: FP8 weights meet activations of 8 bits, at twice the rate.
    """
    faster = box.gpu.fp8_tflops if fp8 and load.precision.name.startswith("fp8") else None
    tflops = faster or box.gpu.bf16_tflops
    return float("inf") if tflops is None else box.count * tflops * TERA * share


def link_us(load: Load, box: Box) -> float:
    each, source = box.link
    if each is None:
        raise UsageError(
            f"The planner cannot predict {box.name}: {source}.",
            "Give --link-us, the time of one small sum over all devices in microseconds.",
        )
    return SUMS_PER_LAYER * len(load.shape.layers) * each


# --- this engine on a GPU: from the streaming probe


@cache
def probe_points() -> tuple[tuple[float, float], ...]:
    """(streaming us a stage, us a stage that streaming did not hide), from the measured probe, shortest stage first."""
    probe = table("peers")["streaming_probe"]
    measured = find_gpu(probe["gpu"]).measured_tbs
    assert measured is not None, "the probe's GPU must have a measured bandwidth"
    points = []
    for point in probe["points"]:
        stages = point["layers"] * point["stages_per_layer"]
        streaming = point["gigabytes"] * 1e9 / (measured * TERA) / MICRO
        points.append((streaming / stages, (1 / point["tokens_per_second"] / MICRO - streaming) / stages))
    return tuple(sorted(points))


def unhidden_us(stage_us: float) -> float:
    """What a stage that streams for `stage_us` adds to it."""
    return between(probe_points(), stage_us)


def _monotape(load: Load, box: Box, context: int, rows: int) -> Pass:
    """Rows beyond one pass take further passes, one after the other."""
    floor = table_floor_us()
    streaming = extra = 0.0
    while rows > 0:
        part = stream_us(load, box, context, min(rows, ROWS_PER_PASS))
        stage = part / load.shape.stages
        streaming += part
        extra += load.shape.stages * max(unhidden_us(stage), floor - stage)
        rows -= ROWS_PER_PASS
    return Pass(streaming, extra, link_us(load, box))


@cache
def table_floor_us() -> float:
    """A stage takes this long even without weights."""
    floor: float = table("peers")["streaming_probe"]["bare_chain_us"]
    return floor


def _monotape_assumption(load: Load, box: Box) -> str:
    points = ", ".join(f"{extra:.2f} us at {stage:.1f} us" for stage, extra in probe_points())
    stages = load.shape.stages
    more = (
        ""
        if box.gpu.name == "h200"
        else f"; {box.gpu.label} is taken to hide as much as the H200 of the probe"
    )
    return (
        f"a prediction from the streaming probe on one H200, not a measurement: {stages} stages a token, each adding to"
        f" its streaming time what the probe could not hide ({points} of streaming), at least {table_floor_us()} us a"
        f" stage; attention, head and sampling are taken as stages like the others{more}"
    )


# --- this engine on a CPU, from reports; stacks that launch kernels; a share of the effective bandwidth


def cpu_engine(shares: Sequence[tuple[int, float]], source: str) -> Engine:
    """The native CPU backend at the share of the read bandwidth that reports measured, by context, shortest first."""

    def time(load: Load, box: Box, context: int, rows: int) -> Pass:
        streaming = stream_us(load, box, context, rows)
        return Pass(streaming, streaming / between(shares, context) - streaming, link_us(load, box))

    shown = ", ".join(f"{100 * share:.0f} % at {context:,}" for context, share in shares)
    text = (
        f"the share of the read bandwidth that was measured at contexts near this one ({shown}; {source}); attention is"
        " bound by arithmetic on a CPU, so longer contexts reach less"
    )
    return Engine("cpu", "Monotape on a CPU", time, lambda load, box: text)


def between(points: Sequence[tuple[float, float]], place: float) -> float:
    """The value at `place`: between two points by a line, before the first and after the last as they are."""
    if place <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return points[-1][1]


def share_engine(share: float) -> Engine:
    """A fixed share of the effective bandwidth, everything included."""
    if not 0 < share <= 1:
        raise UsageError(
            f"--mbu {share:g} is no share of a bandwidth.", "Give a number above 0 and up to 1, like 0.36."
        )

    def time(load: Load, box: Box, context: int, rows: int) -> Pass:
        effective = {name: tbs for name, tbs, _ in box.bandwidths()}.get("effective")
        bandwidth = box.best_bandwidth[0] if effective is None else effective * TERA
        streaming = load.pass_bytes(context, rows) / (box.count * bandwidth) / MICRO
        return Pass(streaming, streaming / share - streaming, 0.0)

    text = f"{100 * share:g} % of the effective bandwidth, links and all (your figure)"
    return Engine("share", "a share of the bandwidth", time, lambda load, box: text)


def _launching(name: str, title: str, launch_us: Callable[[Box], float | None], how: str) -> Engine:
    def time(load: Load, box: Box, context: int, rows: int) -> Pass:
        each = launch_us(box)
        if each is None:
            raise UsageError(
                f"The planner knows no launch time {how} for {box.gpu.label}.", "Give --launch-us."
            )
        launches = box.kernels_per_layer * len(load.shape.layers) * each
        return Pass(stream_us(load, box, context, rows), launches, link_us(load, box))

    def assumption(load: Load, box: Box) -> str:
        each = f"{box.kernels_per_layer} kernels a layer, {launch_us(box)} us each {how}"
        return f"{each}, nothing overlapped and nothing else counted: at most this fast"

    return Engine(name, title, time, assumption)


def throughput_engine(layer_us: float | None = None) -> Engine:
    """A stack tuned for throughput (vLLM): streaming, and a time a layer that is not overlapped with it."""
    each = vllm_layer_us() if layer_us is None else layer_us

    def time(load: Load, box: Box, context: int, rows: int) -> Pass:
        computing = load.flops(context, rows) / peak_flops(load, box) / MICRO
        streaming = max(stream_us(load, box, context, rows), computing)
        return Pass(streaming, each * len(load.shape.layers), link_us(load, box))

    source = "your figure" if layer_us is not None else _vllm_source()
    text = f"{each:.1f} us a layer that streaming does not hide ({source})"
    return Engine("vllm", "a stack tuned for throughput", time, lambda load, box: text)


def _vllm_source() -> str:
    found = vllm_tokens()
    sources = ", ".join(dict.fromkeys(one.source for one in found))
    return f"the median of {versioned(found)} on one H200, where its runs agree within a tenth: {sources}"


_FIXED: Mapping[str, Engine] = {
    DEFAULT_ENGINE: Engine(DEFAULT_ENGINE, "Monotape", _monotape, _monotape_assumption),
    "launches": _launching(
        "launches", "kernels on a stream", lambda box: box.launch_us or box.gpu.launch_us, "on a stream"
    ),
    "graphs": _launching("graphs", "kernels in a graph", lambda box: box.gpu.graph_us, "in a graph"),
}
ENGINES = (*_FIXED, "vllm", "cpu", "share")


def find_engine(name: str) -> Engine:
    """An engine that needs no further figures; "cpu" and "share" are made by the functions above."""
    if name == "vllm":
        return throughput_engine()
    if name not in _FIXED:
        close = ", ".join(nearest_names(name, ENGINES))
        raise UsageError(f"The planner knows no engine {name!r}.", f"The nearest names are {close}.")
    return _FIXED[name]
