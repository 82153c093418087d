"""The machine that would run a model: its ceilings, whether the model fits, and what launching kernels would cost."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.errors import UsageError
from monotape.planner.catalogue import EFFECTIVE_SHARE, EFFECTIVE_SOURCE, Gpu
from monotape.planner.load import Load

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
MAX_DEVICES = 1024
MOST_TBS, MOST_TBS_OF_A_CPU = 100.0, 3.0  # of one device: more is GB/s, as `monotape doctor` prints it
TIGHT = 0.95  # above this share of the memory little is left for anything but weights and KV


@dataclass(frozen=True, slots=True)
class Box:
    """Devices of one kind, and the user's own figures where given."""

    gpu: Gpu
    count: int = 1
    bandwidth_tbs: float | None = None  # of one device, as the user measured it
    memory_gb: float | None = None
    link_us: float | None = None
    launch_us: float | None = None
    kernels_per_layer: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_DEVICES:
            raise UsageError(f"--count {self.count} is no number of devices.", f"Give 1 to {MAX_DEVICES}.")
        if not 1 <= self.kernels_per_layer <= 10_000:
            raise UsageError(
                f"--kernels {self.kernels_per_layer} a layer makes no sense.", "Give 1 to 10000."
            )
        for flag, value in (
            ("--bandwidth", self.bandwidth_tbs), ("--memory", self.memory_gb), ("--link-us", self.link_us),
            ("--launch-us", self.launch_us),
        ):  # fmt: skip
            if value is not None and not 0 < value < 1e9:
                raise UsageError(
                    f"{flag} {value:g} is not a positive number that makes sense.", "Write it like 4.58."
                )
        most = MOST_TBS_OF_A_CPU if self.gpu.name == "cpu" else MOST_TBS
        if self.bandwidth_tbs is not None and self.bandwidth_tbs > most:
            raise UsageError(
                f"--bandwidth {self.bandwidth_tbs:g} is in TB/s, which {self.gpu.label} does not reach.",
                f"If it is in GB/s, as `monotape doctor` measures it, give --bandwidth {self.bandwidth_tbs / 1000:g}.",
            )
        if self.gpu.bandwidth_tbs is None and self.bandwidth_tbs is None:
            raise UsageError(
                f"The planner knows no bandwidth of {self.gpu.label}.",
                "Give --bandwidth in TB/s; `monotape doctor` measures it in GB/s.",
            )

    @property
    def name(self) -> str:
        return f"{self.count}x {self.gpu.label}"

    @property
    def memory(self) -> float | None:
        """Bytes of one device."""
        gigabytes = self.memory_gb or self.gpu.memory_gb
        return None if gigabytes is None else gigabytes * GIGA

    @property
    def link(self) -> tuple[float | None, str]:
        """Microseconds of one sum over all devices, and where the figure comes from."""
        if self.count == 1:
            return 0.0, "one device: nothing to sum"
        if self.link_us is not None:
            return self.link_us, "your figure"
        return self.gpu.link_us, f"{self.gpu.link}: {self.gpu.link_source}"

    @property
    def best_bandwidth(self) -> tuple[float, str]:
        """Bytes a second of one device that predictions build on: measured where it was, else effective."""
        ceiling = {name: (tbs, source) for name, tbs, source in self.bandwidths()}
        tbs, source = ceiling.get("measured") or ceiling["effective"]
        return tbs * TERA, source

    def bandwidths(self) -> list[tuple[str, float, str]]:
        """(name, TB/s of one device, source): datasheet, effective and measured, as far as they are known."""
        found: list[tuple[str, float, str]] = []
        datasheet = self.gpu.bandwidth_tbs
        if datasheet is not None:
            found.append(("datasheet", datasheet, self.gpu.source))
            if self.gpu.effective_tbs is not None and self.gpu.effective_source is not None:
                found.append(("effective", self.gpu.effective_tbs, self.gpu.effective_source))
            else:
                found.append(("effective", datasheet * EFFECTIVE_SHARE, EFFECTIVE_SOURCE))
        if self.bandwidth_tbs is not None:
            found.append(("measured", self.bandwidth_tbs, "your figure, of one device"))
        elif self.gpu.measured_tbs is not None and self.gpu.measured_source is not None:
            found.append(("measured", self.gpu.measured_tbs, self.gpu.measured_source))
        return found


@dataclass(frozen=True, slots=True)
class Ceiling:
    """No engine can be faster: the bytes of a token at a bandwidth."""

    name: str
    terabytes_per_second: float  # all devices together
    tokens_per_second: float
    source: str


def ceilings(box: Box, token_bytes: float) -> tuple[Ceiling, ...]:
    together = f"; {box.count} devices are taken to add up" if box.count > 1 else ""
    return tuple(
        Ceiling(
            name, tbs * box.count, tokens_per_second(tbs * box.count * TERA, token_bytes), source + together
        )
        for name, tbs, source in box.bandwidths()
    )


def tokens_per_second(bytes_per_second: float, token_bytes: float) -> float:
    return bytes_per_second / token_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """What lies on one device, in bytes."""

    weights: float
    kv: float
    memory: float | None

    @property
    def used(self) -> float:
        return self.weights + self.kv

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else self.used <= self.memory

    @property
    def share(self) -> float | None:
        return None if self.memory is None else self.used / self.memory


def fit(load: Load, box: Box, context: int, sequences: int = 1) -> Fit:
    """Weights split evenly; the KV of each sequence by heads, as far as there are heads."""
    kv = load.shape.kv_stored_bytes(context, load.kv_value_bytes, box.count)
    return Fit(load.weight_bytes / box.count, sequences * kv, box.memory)


@dataclass(frozen=True, slots=True)
class LaunchTax:
    """What a stack pays for launching kernels, before a byte is read."""

    kernels_per_layer: int
    layers: int
    launch_us: float
    where: str

    @property
    def token_us(self) -> float:
        return self.kernels_per_layer * self.layers * self.launch_us

    @property
    def most_tokens_per_second(self) -> float:
        return 1 / (self.token_us * MICRO)


def launch_taxes(box: Box, layers: int) -> tuple[LaunchTax, ...]:
    """Kernels launched one after the other, and inside a graph, as far as there are figures."""
    if box.launch_us is not None:
        found = [(box.launch_us, "your figure")]
    else:
        found = [
            (us, f"{how}; {box.gpu.launch_source}")
            for us, how in ((box.gpu.launch_us, "on a stream"), (box.gpu.graph_us, "in a graph"))
            if us is not None
        ]
    return tuple(LaunchTax(box.kernels_per_layer, layers, us, where) for us, where in found)


def flops_per_byte(weight_bytes: float) -> float:
    """What a weight of this size is good for at batch 1: one multiplication and one addition."""
    return 2 / weight_bytes


def balance(box: Box, fp8: bool = False) -> float | None:
    """FLOPs that the device can do while it reads one byte."""
    tflops = box.gpu.fp8_tflops if fp8 else box.gpu.bf16_tflops
    return None if tflops is None or box.gpu.bandwidth_tbs is None else tflops / box.gpu.bandwidth_tbs
