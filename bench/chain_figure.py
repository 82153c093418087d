"""Draws the report of bench/chain.py: where the time of a layer goes, a bar a stage, a panel a shape.

python bench/chain_figure.py reports/chain-h200.json docs/figures/chain.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from chain import PARTS, bars, layer_ns, name_of
from scaling import Setup

#: Told apart by their hatches too.
STYLES = {
    "waiting": ("#e4e4e4", ""), "multiplying": ("#b3431b", ""), "meeting": ("#f0b79e", "///"),
    "finishing": ("#5f6b76", "..."), "between": ("white", ""),
}  # fmt: skip
MEANINGS = {
    "waiting": "waiting for words", "multiplying": "multiplying", "meeting": "waiting for other warps",
    "finishing": "adding up and publishing", "between": "between stages",
}  # fmt: skip


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "monotape", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 12,
        "axes.spines.top": False, "axes.spines.right": False, "path.simplify": False, "hatch.linewidth": 0.6,
    }  # fmt: skip
    rows = report["results"]
    heights = [len(row["chain"]["layer"]) + 1 for row in rows]
    with matplotlib.rc_context(style):
        canvas = Figure(figsize=(10, 0.42 * sum(heights) + 2.2), layout="constrained")
        FigureCanvasAgg(canvas)
        title = f"Where a layer's time goes on one {report['gpu'].upper()}, the mean over the workers that take part"
        canvas.suptitle(title, fontsize=13, fontweight="bold")
        panels: Any = canvas.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axes, row in zip(panels, rows, strict=True):
            _panel(axes, row)
        panels[-1].set_xlabel("microseconds of a layer")
        handles, labels = panels[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
        canvas.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Title": title})


def _panel(axes: Any, row: dict[str, Any]) -> None:
    stages = [*bars(row), "between stages"]
    widths = {part: [_ns(row, stage, part) / 1000 for stage in stages] for part in (*PARTS, "between")}
    left = [0.0] * len(stages)
    for part, values in widths.items():
        colour, hatch = STYLES[part]
        axes.barh(
            stages, values, left=left, color=colour, hatch=hatch, edgecolor="#444444", linewidth=0.6,
            label=MEANINGS[part],
        )  # fmt: skip
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    name = name_of(Setup(row["model"], row["ranks"], row["setting"]))
    axes.set_title(f"{name}: {layer_ns(row) / 1000:.1f} us", loc="left", fontsize=12)


def _ns(row: dict[str, Any], stage: str, part: str) -> float:
    chain = row["chain"]
    if stage == "between stages":
        return float(chain["between_ns"]) if part == "between" else 0.0
    return float(bars(row)[stage].get(part, 0.0))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("Usage: python bench/chain_figure.py REPORT.json PICTURE.svg")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
