"""The data behind a picture: ceilings over the context, bytes per token, measured points against their ceiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monotape.planner.box import MICRO, ceilings
from monotape.planner.estimate import Estimate
from monotape.planner.reports import Point, own_points, peer_points, points_for

FIRST_CONTEXT = 32
LAST_CONTEXT = 1 << 17
SHORT = 64  # contexts at which speeds are compared as shares of the ceiling


@dataclass(frozen=True, slots=True)
class Figure:
    """What is drawn, and nothing else: the same data gives the same picture."""

    title: str
    contexts: tuple[int, ...]
    lines: dict[str, tuple[float, ...]]  # tokens a second over the contexts, by name of the line
    points: tuple[Point, ...]  # measured with this model on this device
    bars: dict[str, tuple[float, ...]]  # gigabytes a token over bar_contexts, by heading
    bar_contexts: tuple[int, ...]
    shares: tuple[tuple[str, float, bool], ...]  # label, share of the ceiling, ours

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "contexts": list(self.contexts),
            "lines": {name: [round(value, 3) for value in values] for name, values in self.lines.items()},
            "points": [[point.label, point.context, point.tokens_per_second] for point in self.points],
            "bars": {name: [round(value, 6) for value in values] for name, values in self.bars.items()},
            "bar_contexts": list(self.bar_contexts),
            "shares": [[label, round(share, 4), own] for label, share, own in self.shares],
        }


def figure_of(found: Estimate, reports: dict[str, dict[str, Any]]) -> Figure:
    contexts = _contexts(found)
    lines: dict[str, list[float]] = {}
    for context in contexts:
        for one in ceilings(found.box, found.load.pass_bytes(context)):
            lines.setdefault(one.name, []).append(one.tokens_per_second)
        if found.prediction is not None:
            time = found.engine.pass_us(found.load, found.box, context)
            lines.setdefault(f"{found.engine.title}, predicted", []).append(1 / (time * MICRO))
    bar_contexts = tuple(contexts[index * (len(contexts) - 1) // 4] for index in range(5))
    groups = [found.load.bytes_by_group(context) for context in bar_contexts]
    return Figure(
        title=f"{found.source.name} on {found.box.name}, weights in {found.load.precision.name}, one user",
        contexts=contexts,
        lines={name: tuple(values) for name, values in lines.items()},
        points=points_for(found.box, found.source.name, found.load.precision.name, reports),
        bars={name: tuple(group[name] / 1e9 for group in groups) for name in groups[0] if groups[-1][name]},
        bar_contexts=bar_contexts,
        shares=_shares(found, reports),
    )


def _contexts(found: Estimate) -> tuple[int, ...]:
    last = min(found.shape.context or LAST_CONTEXT, LAST_CONTEXT)
    powers = [FIRST_CONTEXT]
    while powers[-1] * 2 <= last:
        powers.append(powers[-1] * 2)
    return tuple(powers)


def _shares(found: Estimate, reports: dict[str, dict[str, Any]]) -> tuple[tuple[str, float, bool], ...]:
    """The share of its ceiling that each stack reaches at a short context: peers on this model and weight format, and
    this engine wherever it was measured."""
    peers = [
        (point.label, point.share, False)
        for point in peer_points()
        if point.context <= SHORT
        and point.model == found.source.name
        and point.dtype == found.load.precision.name
    ]
    own = [
        (f"Monotape, {_short(point.model)}, {point.machine}", point.share, True)
        for point in own_points(reports)
        if point.context <= SHORT
    ]
    return tuple(sorted((*peers, *own), key=lambda row: (row[1], row[0])))


def _short(model: str) -> str:
    """meta-llama/Llama-3.2-1B -> Llama-3.2-1B; what a file's name adds about its format is left out."""
    return model.rpartition("/")[2].partition("-instruct")[0]
