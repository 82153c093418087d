"""Draws the report of bench/scaling.py: tokens per second over the link's delay, a panel a model.

python bench/scaling_figure.py reports/scaling-h200.json docs/figures/scaling.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Told apart by dash and marker; the colours only help.
STYLES = {"tp": ("--", "o", "#5f6b76"), "dtp": ("-", "*", "#b3431b"), "silent": (":", "s", "black")}
NAMES = {"tp": "tensor parallel", "dtp": "delayed tensor parallel", "silent": "no communication"}


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "monotape", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 13,
        "axes.spines.top": False, "axes.spines.right": False, "path.simplify": False,
    }  # fmt: skip
    models = list(dict.fromkeys(row["model"] for row in report["results"]))
    with matplotlib.rc_context(style):
        canvas = Figure(figsize=(11, 5.6), layout="constrained")
        FigureCanvasAgg(canvas)
        title = (
            f"One rank of several on one {report['gpu'].upper()}, its peers' words looped back (an emulation)"
        )
        canvas.suptitle(title, fontsize=13, fontweight="bold")
        panels: Any = canvas.subplots(1, len(models), squeeze=False)[0]
        for axes, model in zip(panels, models, strict=True):
            _panel(axes, model, [row for row in report["results"] if row["model"] == model])
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=11)
        metadata = {"Date": None, "Creator": None, "Title": title}
        canvas.savefig(path, format="svg", metadata=metadata)


def _panel(axes: Any, model: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["setting"] not in STYLES:
            speed = row["tokens_per_second"]["0"]["median"]
            axes.axhline(speed, color="#999999", linewidth=1.2, label="one GPU")
            continue
        dash, marker, colour = STYLES[row["setting"]]
        delays = [int(delay) for delay in row["tokens_per_second"]]
        speeds = [found["median"] for found in row["tokens_per_second"].values()]
        label = f"{NAMES[row['setting']]}, {row['ranks']} ranks"
        width = 1.2 + 0.25 * row["ranks"]
        axes.plot(delays, speeds, dash, marker=marker, color=colour, linewidth=width, label=label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_xlabel("delay of the link, microseconds")
    axes.set_ylabel("tokens per second")
    axes.set_title(model, loc="left", fontsize=13)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("Usage: python bench/scaling_figure.py REPORT.json PICTURE.svg")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
