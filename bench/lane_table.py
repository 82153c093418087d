"""Quality against speed: trained Laneformers beside the tokens per second of their settings, as a table and a figure.

    python bench/lane_table.py --split RUNS/results.json          # one JSON a run into reports/lanes/
    python bench/lane_table.py --figure docs/figures/lanes.svg    # the figure; the table goes to standard output
    python bench/index.py                                         # the table of docs/delayed-tensor-parallelism.md

Quality is from reports/lanes/*.json (python -m monotape.training table), speed from reports/lanes-*.json:
python bench/scaling.py --models laneformer-32m --ranks 4,8 --delays 0,2 --settings all --name lanes --save
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monotape.errors import MonotapeError
from monotape.training.table import noise, rows
from rows import Report, Row
from rows import table as document_table

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "reports" / "lanes"
BESIDE = (
    "corpus.json",
    "logits.json",
)  # lie beside the runs: what they were trained on, what bench/lane_logits.py found
#: The setting of bench/scaling.py that an arm has.
SETTING = {
    "tp": "tp", "dtp1-scale": "dtp1", "dtp1-sum": "dtp1-sum", "dtp2-scale": "dtp", "dtp2-sum": "dtp2-sum",
    "ladder": "ladder", "silent": "silent",
}  # fmt: skip
NAMES = {
    "tp": "tensor parallelism", "dtp1-scale": "delay 1, early scaled", "dtp1-sum": "delay 1, early sums",
    "dtp2-scale": "delay 2, early scaled", "dtp2-sum": "delay 2, early sums", "ladder": "Ladder Residual",
    "silent": "no communication",
}  # fmt: skip
#: Told apart by marker; the colours only help.
STYLES = {
    "tp": ("o", "#5f6b76"), "dtp1-scale": ("*", "#b3431b"), "dtp1-sum": ("P", "#b3431b"),
    "dtp2-scale": ("^", "#d98b1f"), "dtp2-sum": ("v", "#d98b1f"), "ladder": ("D", "#2b6ca3"), "silent": ("s", "black"),
}  # fmt: skip
DELAYS = ("0", "2")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", type=Path, help="the results of a table, to be kept one by one")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument(
        "--speeds", type=Path, help="the report of bench/scaling.py; default: reports/lanes-*.json"
    )
    parser.add_argument("--figure", type=Path)
    return parser.parse_args()


def split(results: Path, folder: Path) -> None:
    """One JSON a run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in json.loads(results.read_text()).items():
        (folder / f"{name}.json").write_text(json.dumps(result) + "\n")


def read_runs(folder: Path) -> dict[str, dict[str, Any]]:
    paths = [path for path in sorted(folder.glob("*.json")) if path.name not in BESIDE]
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    if not found:
        sys.exit(f"There is no run in {folder}; --split puts them there.")
    return found


def read_speeds(path: Path | None) -> dict[tuple[str, int], dict[str, float]]:
    """Tokens per second by setting and ranks, then by the link's delay."""
    paths = [path] if path else sorted((ROOT / "reports").glob("lanes-*.json"))
    return speeds_in(json.loads(paths[-1].read_text())) if paths else {}


def speeds_in(report: Report) -> dict[tuple[str, int], dict[str, float]]:
    return {
        (row["setting"], row["ranks"]): {
            delay: row["tokens_per_second"][delay]["median"]
            for delay in DELAYS
            if delay in row["tokens_per_second"]
        }
        for row in report["results"]
    }


def joined(
    results: Mapping[str, Mapping[str, Any]], speeds: Mapping[tuple[str, int], Mapping[str, float]]
) -> list[dict[str, Any]]:
    """A row for each arm and number of lanes; arms whose lanes never differ have one for each number measured."""
    lane_counts = sorted({ranks for _, ranks in speeds if ranks > 1}) or [8]
    made = []
    for row in rows(results):
        for lanes in [row["lanes"]] if row["lanes"] else lane_counts:
            made.append({**row, "lanes": lanes, "speeds": speeds.get((SETTING[row["arm"]], lanes), {})})
    return made


def text(table: list[dict[str, Any]]) -> str:
    lines = [
        "| lanes | how they talk | seed | bits per byte | more than TP, seed 1 | tok/s, no delay | tok/s, 2 us |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(table, key=lambda row: row["lanes"]):
        speeds = [
            f"{row['speeds'][delay]:,.0f}" if delay in row["speeds"] else "not measured" for delay in DELAYS
        ]
        lines.append(
            f"| {row['lanes']} | {NAMES[row['arm']]} | {row['seed']} | {row['bits_per_byte']:.4f} | "
            f"{row['more_than_tp']:+.4f} ± {row['its_error']:.4f} | {speeds[0]} | {speeds[1]} |"
        )
    return "\n".join(lines)


def in_document(reports: Mapping[str, Report]) -> str:
    """The table of docs/delayed-tensor-parallelism.md: a row an arm, with its first seed and the range of all."""
    found = sorted(name for name in reports if name.startswith("lanes-"))
    if not found or not any(path.name not in BESIDE for path in RUNS.glob("*.json")):
        return ""
    name = found[-1]
    joint = joined(read_runs(RUNS), speeds_in(reports[name]))
    made = [
        _document_row(name, reports[name], row, joint)
        for row in sorted(joint, key=lambda row: row["lanes"])
        if row["seed"] == 1
    ]
    head = (
        "lanes",
        "how they talk",
        "bits per byte",
        "more than TP",
        "no delay",
        "words 2 microseconds late",
    )
    return document_table(head, made)


def _document_row(name: str, report: Report, row: dict[str, Any], joint: list[dict[str, Any]]) -> Row:
    others = [
        one["bits_per_byte"] for one in joint if one["arm"] == row["arm"] and one["lanes"] == row["lanes"]
    ]
    spread = f" (three seeds: {min(others):.4f} to {max(others):.4f})" if len(others) > 1 else ""
    made = Row(name, report, f"results[ranks={row['lanes']}&setting={SETTING[row['arm']]}].tokens_per_second")
    made.text(row["lanes"]).text(f"[{NAMES[row['arm']]}](../reports/lanes/{row['run']}.json)")
    made.text(f"{row['bits_per_byte']:.4f}{spread}")
    made.text(f"{row['more_than_tp']:+.4f} ± {row['its_error']:.4f}" if row["arm"] != "tp" else "")
    return made.number("0", "tok/s").number("2", "tok/s")


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """A panel for each number of lanes: hollow without delay, filled at 2 us, a line between; TP's seeds as a band."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "monotape", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 13,
        "axes.spines.top": False, "axes.spines.right": False, "path.simplify": False,
    }  # fmt: skip
    counts = sorted({row["lanes"] for row in table})
    with matplotlib.rc_context(style):
        canvas = Figure(figsize=(11, 5.6), layout="constrained")
        FigureCanvasAgg(canvas)
        title = (
            "Quality against speed: bits per byte of held-out Python, tokens per second of one emulated rank"
        )
        canvas.suptitle(title, fontsize=13, fontweight="bold")
        panels: Any = canvas.subplots(1, len(counts), squeeze=False, sharey=True)[0]
        for axes, lanes in zip(panels, counts, strict=True):
            _panel(axes, lanes, [row for row in table if row["lanes"] == lanes])
        panels[0].set_ylabel("bits per byte (lower is better)")
        canvas.supxlabel("tokens per second; hollow: no delay, filled: words 2 us late", fontsize=13)
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=11)
        canvas.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Title": title})


def _panel(axes: Any, lanes: int, table: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    if (band := noise(table)) is not None:
        axes.axhspan(*band, color="#dddddd", label="TP's seeds")
    for row in table:
        if row["seed"] != 1:
            continue
        marker, colour = STYLES[row["arm"]]
        points = [(row["speeds"][delay], delay) for delay in DELAYS if delay in row["speeds"]]
        axes.plot(
            [speed for speed, _ in points],
            [row["bits_per_byte"]] * len(points),
            "-",
            color=colour,
            linewidth=1,
        )
        for speed, delay in points:
            face = colour if delay == "2" else "white"
            label = NAMES[row["arm"]] if delay == "2" else None
            axes.plot(
                [speed],
                [row["bits_per_byte"]],
                marker,
                color=colour,
                markerfacecolor=face,
                markersize=9,
                label=label,
            )
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_title(f"{lanes} lanes", loc="left", fontsize=13)
    axes.grid(color="#eeeeee", linewidth=0.8)


def main() -> int:
    options = parse_arguments()
    try:
        if options.split is not None:
            split(options.split, options.runs)
        table = joined(read_runs(options.runs), read_speeds(options.speeds))
    except (MonotapeError, OSError, ValueError, KeyError) as error:
        sys.exit(f"The table cannot be made: {error}")
    print(text(table))
    if options.figure is not None:
        draw(table, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
