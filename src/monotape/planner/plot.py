"""Draws a Figure with matplotlib: readable in black and white and at half size, the same bytes for the same data."""

from __future__ import annotations

import io
import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from monotape.errors import ResourceError, UsageError
from monotape.planner.estimate import Estimate
from monotape.planner.figure import Figure, figure_of
from monotape.planner.text import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Told apart by dash, marker and hatch; the colours only help.
_LINES = {
    "datasheet": ("--", "#5f6b76", 1.6),
    "effective": (":", "#5f6b76", 2.2),
    "measured": ("-", "black", 2.6),
}
_PREDICTED = ("-.", "#b3431b", 2.6)
_MARKERS = "osDvPXh<>d"
_HATCHES = {"attention": "", "dense_ffn": "//", "experts": "xx", "head": "..", "kv": ""}
_FILLS = {
    "attention": "#e8e4da",
    "dense_ffn": "#c9d6df",
    "experts": "#c9d6df",
    "head": "#f2f2f2",
    "kv": "#3a3f44",
}
_NAMES = {
    "attention": "attention",
    "dense_ffn": "dense FFN",
    "experts": "experts",
    "head": "head",
    "kv": "KV cache",
}
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "monotape", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 13,
    "hatch.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "path.simplify": False,
}  # fmt: skip


def draw(found: Estimate, reports: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture to `path`; its ending says as what."""
    figure = figure_of(found, reports)
    if path.suffix == ".html":
        content = _page(figure, describe(found), render(figure, "svg").decode()).encode()
    else:
        content = render(figure, path.suffix.removeprefix("."))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ResourceError(
            f"{path} cannot be written: {error.strerror or error}.", "Choose another place for --plot."
        ) from error


def render(figure: Figure, kind: str) -> bytes:
    """The picture as SVG or PNG."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise UsageError("--plot needs matplotlib.", "Run `pip install 'monotape[plot]'`.") from error
    with matplotlib.rc_context(_STYLE):
        heights = 4.8, max(6.0, 1.4 + 0.33 * len(figure.shares))  # inches: a bar's name may take two lines
        canvas = Canvas(figsize=(10, sum(heights)), layout="constrained")
        FigureCanvasAgg(canvas)
        above, below = cast("Any", canvas.subfigures(2, 1, height_ratios=heights))
        canvas.suptitle(figure.title.replace(" on ", "\non ", 1), fontsize=13, fontweight="bold")
        _roofline(above.subplots(), figure)
        left, right = below.subplots(1, 2, width_ratios=(1, 1.25))
        _bars(left, figure)
        _shares(right, figure)
        buffer = io.BytesIO()
        description = json.dumps(figure.as_json())
        if kind == "svg":
            metadata = {"Date": None, "Creator": None, "Title": figure.title, "Description": description}
        else:
            metadata = {"Software": None, "Title": figure.title, "Description": description}
        canvas.savefig(buffer, format=kind, dpi=100, metadata=metadata)
    return buffer.getvalue()


def _roofline(axes: Axes, figure: Figure) -> None:
    axes.set_xscale("log", base=2)
    for name, values in figure.lines.items():
        dash, colour, width = _LINES.get(name, _PREDICTED)
        label = f"ceiling, {name} bandwidth" if name in _LINES else name
        axes.plot(figure.contexts, values, dash, color=colour, linewidth=width, label=label)
    counted = Counter(point.label for point in figure.points)  # one context makes no curve: see the shares
    labels = [label for label, count in counted.items() if count > 1]
    for number, label in enumerate(labels):
        points = [point for point in figure.points if point.label == label]
        own = points[0].own
        axes.plot(
            [point.context for point in points], [point.tokens_per_second for point in points], "-", linewidth=0.9,
            color="#5f6b76", marker="*" if own else _MARKERS[number % len(_MARKERS)], markersize=15 if own else 9,
            markerfacecolor="#b3431b" if own else "none", markeredgecolor="black", markeredgewidth=1.4, label=label,
        )  # fmt: skip
    ticks = figure.contexts[::2]
    axes.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens per second")
    axes.set_title("Speed of light, and what was measured", loc="left", fontsize=13)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=12, handlelength=2.6)


def _bars(axes: Axes, figure: Figure) -> None:
    places = range(len(figure.bar_contexts))
    floor = [0.0] * len(figure.bar_contexts)
    for name, values in figure.bars.items():
        axes.bar(
            places, values, 0.72, bottom=floor, label=_NAMES[name], color=_FILLS[name], hatch=_HATCHES[name],
            edgecolor="black", linewidth=0.9,
        )  # fmt: skip
        floor = [low + value for low, value in zip(floor, values, strict=True)]
    axes.set_xticks(list(places), [_tokens(context) for context in figure.bar_contexts])
    axes.set_ylim(top=max(floor) * 1.45)  # room for the legend
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("gigabytes")
    axes.set_title("What a token reads", loc="left", fontsize=13)
    axes.legend(loc="upper left", frameon=False, fontsize=11.5, ncols=2, handlelength=1.4, columnspacing=1.0)


def _shares(axes: Axes, figure: Figure) -> None:
    axes.set_title("Share of the ceiling, short context", loc="left", fontsize=13)
    if not figure.shares:
        axes.text(
            0.5, 0.5, "nothing measured for this model", ha="center", va="center", transform=axes.transAxes
        )
        axes.set_axis_off()
        return
    places = range(len(figure.shares))
    for place, (_, share, own) in zip(places, figure.shares, strict=True):
        axes.barh(
            place, 100 * share, 0.7, color="#b3431b" if own else "#dfe3e6", hatch="xx" if own else "",
            edgecolor="black", linewidth=0.9,
        )  # fmt: skip
        at = 100 * share + 1.5 if share < 0.85 else 102  # on the other side of the line
        axes.text(at, place, f"{100 * share:.0f} %", va="center", fontsize=11.5)
    axes.set_yticks(
        list(places), [_folded(label) for label, _, _ in figure.shares], fontsize=9.5, linespacing=0.95
    )
    axes.set_xlim(0, 116)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.axvline(100, color="black", linewidth=2.2)
    axes.set_xlabel("percent of the measured read bandwidth")


def _folded(label: str) -> str:
    """Two lines where one would be long."""
    if len(label) <= 24:
        return label
    space = label.rfind(" ", 0, 24)
    return label if space < 0 else f"{label[:space]}\n{label[space + 1 :]}"


def _tokens(context: int) -> str:
    return f"{context // 1024}K" if context >= 1024 else str(context)


def _page(figure: Figure, text: str, svg: str) -> str:
    """One file: the picture, the same in words, and the points as a table."""
    picture = svg[svg.index("<svg") :]
    rows = "".join(
        f"<tr><td>{escape(point.label)}</td><td>{point.context:,}</td><td>{point.tokens_per_second:,.0f}</td>"
        f"<td>{100 * point.share:.0f} %</td><td>{escape(point.source)}</td></tr>\n"
        for point in figure.points
    )
    head = "<tr><th>stack</th><th>context</th><th>tok/s</th><th>of the ceiling</th><th>conditions</th></tr>\n"
    table = f"<table>\n{head}{rows}</table>\n" if rows else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(figure.title)}</title>\n'
        "<style>body{font:15px sans-serif;max-width:1000px;margin:2em auto}svg{width:100%;height:auto}"
        "td,th{text-align:left;padding:2px 12px}pre{white-space:pre-wrap}</style>\n"
        f"{picture}\n{table}<pre>{escape(text)}</pre>\n</html>\n"
    )
