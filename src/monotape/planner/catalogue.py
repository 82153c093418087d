"""The facts that come with the package: GPUs, model configs and measured points, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from monotape.errors import UsageError

DATA = Path(__file__).parent / "data"
#: Share of the datasheet's bandwidth, where no measurement is published. Kog sells inference for one user.
EFFECTIVE_SHARE = 0.8
EFFECTIVE_SOURCE = (
    "80 % of the datasheet, assumed: the share that the inference company Kog calls realistic for the H200"
    " (blog.kog.ai, 28 May 2026)"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, as its maker describes it and as far as it was measured. TB/s are 1e12 bytes a second."""

    name: str
    label: str
    aliases: tuple[str, ...]
    announced: bool
    memory_gb: float | None
    bandwidth_tbs: float | None
    source: str
    effective_tbs: float | None
    effective_source: str | None
    measured_tbs: float | None
    measured_source: str | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    flops_source: str | None
    link: str
    link_gbs: float | None
    link_us: float | None
    link_source: str
    launch_us: float | None
    graph_us: float | None
    launch_source: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the built-in table."""

    name: str
    config: Mapping[str, Any]
    source: str
    published_total: int
    published_active: int | None
    published_source: str
    exception: str | None  # why the count differs from the published size by more than 2 %


@cache
def table(name: str) -> dict[str, Any]:
    """One of the data files, as it is."""
    loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text("utf-8"))
    return loaded


@cache
def gpus() -> Mapping[str, Gpu]:
    found = {}
    for name, row in table("gpus").items():
        values = {
            field.name: row[field.name] for field in fields(Gpu) if field.name not in ("name", "aliases")
        }
        found[name] = Gpu(name=name, aliases=tuple(row["aliases"]), **values)
    return found


@cache
def models() -> Mapping[str, KnownModel]:
    return {
        name: KnownModel(
            name=name,
            config=row["config"],
            source=row["source"],
            published_total=row["published"]["total"],
            published_active=row["published"]["active"],
            published_source=row["published"]["source"],
            exception=row["published"]["exception"],
        )
        for name, row in table("models").items()
    }


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, written with or without dashes, spaces and capitals."""
    wanted = plain(name)
    for gpu in gpus().values():
        if wanted in map(plain, (gpu.name, *gpu.aliases)):
            return gpu
    close = ", ".join(nearest_names(name, gpus()))
    raise UsageError(
        f"The planner knows no GPU {name!r}.", f"The nearest names are {close}; see `monotape plan --list`."
    )


#: Names that the engine knows too.
_ALIASES = {"smollm2": "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m"}


def find_model(name: str) -> KnownModel | None:
    """The built-in model of that id or short name; "Meta-" before and "-Instruct" after it may be left out."""
    wanted = plain(_ALIASES.get(name, name))
    for model in models().values():
        if wanted in short_names(model.name):
            return model
    return None


def short_names(model: str) -> set[str]:
    """The ways to write a model's name: with its organisation or without, and without what adds nothing."""
    bare = model.partition("/")[2].lower()
    stripped = bare.removeprefix("meta-").removesuffix("-v1.0").removesuffix("-v0.1").removesuffix("-chat")
    stripped = stripped.removesuffix("-instruct").removesuffix("-it")
    return {plain(model), plain(bare), plain(stripped)}


def plain(name: str) -> str:
    """A name without what people write differently."""
    return "".join(letter for letter in name.lower() if letter not in "-_ .")


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that look most like `name`, the best first."""
    from difflib import SequenceMatcher

    def likeness(other: str) -> tuple[float, str]:
        ways = short_names(other) if "/" in other else {plain(other)}
        return -max(SequenceMatcher(None, plain(name), way).ratio() for way in sorted(ways)), other

    return sorted(known, key=likeness)[:count]
