"""Times of prompts, and of vLLM, that reports hold, and what they say of models that were not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from monotape.planner.accounting import shape_from_config
from monotape.planner.box import MICRO, TERA, Box
from monotape.planner.catalogue import find_gpu, find_model, table
from monotape.planner.load import Load
from monotape.planner.precision import kv_bytes_for, precision_for

OWN, VLLM = "monotape", "vllm"  # as bench/compare.py calls them
PROMPT, TOKEN = "prompt", "token"
_DTYPE = "bf16"  # in which both engines were measured at every length
_FAR_APART = 0.1  # of the median: where runs differ by more, the host set their pace


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured time: to the first token after a prompt of that length, or of one token at that context."""

    engine: str
    version: str  # of vLLM
    what: str
    model: str
    machine: str
    length: int
    seconds: float
    source: str

    @property
    def load(self) -> Load:
        known = find_model(self.model)
        assert known is not None, "only built-in models are kept"
        config = known.config
        return Load(shape_from_config(config), precision_for(_DTYPE, config), kv_bytes_for(_DTYPE))

    @property
    def reading_s(self) -> float:
        """Of the weights once, and of the KV before a token."""
        load, context = self.load, 0 if self.what == PROMPT else self.length
        return load.pass_bytes(context) / Box(find_gpu(self.machine)).best_bandwidth[0]

    @property
    def computing_s(self) -> float:
        """Of a prompt, at the dense peak."""
        tflops = find_gpu(self.machine).bf16_tflops
        assert tflops is not None, "prompts were timed where the peak is known"
        return self.length * self.load.flops(self.length // 2) / (tflops * TERA)


def timed(reports: Mapping[str, Mapping[str, Any]]) -> tuple[Timed, ...]:
    """What bench/compare.py and bench/prefill.py reported of built-in models, but for runs that are far apart."""
    return tuple(
        one
        for name, report in reports.items()
        if name.startswith(("compare-", "prefill-")) and report.get("dtype") == _DTYPE and report.get("gpu")
        for one in _of_report(name, report)
    )


def _of_report(name: str, report: Mapping[str, Any]) -> Iterator[Timed]:
    whole = name.removesuffix(".json").split("-", 2)[-1].removesuffix(f"-{_DTYPE}")
    model = find_model(whole)
    if model is None:
        return
    versions = {one["engine"]: one.get("version", "") for one in report.get("engines", ())}

    def row(engine: str, what: str, length: int, median: float, scale: float) -> Timed:
        return Timed(
            engine, versions.get(engine, ""), what, model.name, report["gpu"], length, median * scale, f"reports/{name}"
        )  # fmt: skip

    for one in report.get("prefill", ()):
        if one["cached"] == 0 and _close(one["first_token_ms"]):
            yield row(OWN, PROMPT, one["prompt"], one["first_token_ms"]["median"], 1e-3)
    for one in report.get("first_token", ()):
        for engine in (OWN, VLLM):
            runs = one["first_token_ms"].get(engine)
            if runs is not None and _close(runs):
                yield row(engine, PROMPT, one["prompt"], runs["median"], 1e-3)
    for one in report.get("decode", ()):
        runs = one["tokens_per_second"].get(VLLM)
        if runs is not None and _close(runs):
            yield row(VLLM, TOKEN, one["context"], 1 / runs["median"], 1.0)


def _close(runs: Mapping[str, float]) -> bool:
    return runs["max"] - runs["min"] <= _FAR_APART * runs["median"]


@cache
def built_in_times() -> tuple[Timed, ...]:
    """What reports/ held when this version was made."""
    return tuple(Timed(**row) for row in table("measured")["times"])


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """A prompt computes at a share of the dense peak; a pass takes no less than reading, and a time a layer."""

    share: float
    layer_us: float
    fp8: bool  # whether FP8 weights meet activations of 8 bits; in this engine activations have 16
    source: str


@cache
def prefill_speed(engine: str) -> PrefillSpeed:
    """From all prompts of that engine: the short ones say how long a layer takes, the others which share is reached."""
    found = [one for one in built_in_times() if (one.engine, one.what) == (engine, PROMPT)]
    short = [one for one in found if one.reading_s > one.computing_s]
    name = "this engine" if engine == OWN else versioned(found)
    sources = ", ".join(dict.fromkeys(one.source for one in found))
    return PrefillSpeed(
        median([one.computing_s / one.seconds for one in found if one not in short]),
        median([_beyond_reading_us(one) for one in short]),
        engine != OWN,
        f"medians of {name} in {_DTYPE} on one H200: {sources}",
    )


@cache
def vllm_layer_us() -> float:
    """What a token of vLLM adds to streaming, by layer."""
    return median([_beyond_reading_us(one) for one in vllm_tokens()])


def vllm_tokens() -> tuple[Timed, ...]:
    return tuple(one for one in built_in_times() if (one.engine, one.what) == (VLLM, TOKEN))


def versioned(times: list[Timed] | tuple[Timed, ...]) -> str:
    return " and ".join(dict.fromkeys(f"vLLM {one.version}" for one in times))


def _beyond_reading_us(one: Timed) -> float:
    return (one.seconds - one.reading_s) / MICRO / len(one.load.shape.layers)


def median(values: list[float]) -> float:
    """The standard library's takes longer to import than a plan takes to make."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
