"""Measured points: what reports/ holds of this engine, and what is known of its peers, each against its ceiling."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monotape.errors import UsageError
from monotape.planner.accounting import shape_from_config
from monotape.planner.box import TERA, Box, tokens_per_second
from monotape.planner.catalogue import find_gpu, find_model, models, table
from monotape.planner.compared import median, timed
from monotape.planner.load import Load
from monotape.planner.precision import kv_bytes_for, precision_for


@dataclass(frozen=True, slots=True)
class Point:
    """One measured decode speed, and the share of the read bandwidth that it stands for."""

    label: str
    model: str
    machine: str  # a GPU's name, or a processor's
    dtype: str
    context: int
    tokens_per_second: float
    share: float
    source: str
    own: bool  # measured with this engine


CONTROLS = "round-"  # bench/shapes.py: ROUND


def load_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Every report of a folder, by file name."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is no folder with reports.", "Give --reports, the folder that benchmarks write to."
        )
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            report = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} cannot be read as a report: {error}.", "Remove it or write it anew."
            ) from error
        if not isinstance(report, dict):
            raise UsageError(f"{path} holds no report.", "Remove it or write it anew.")
        found[path.name] = report
    return found


def own_points(reports: dict[str, dict[str, Any]]) -> tuple[Point, ...]:
    """The decode speeds in reports of bench/decode.py; other reports hold none.

    Shapes that are no models, but only there to compare others with, are left out.
    """
    found = []
    for name, report in reports.items():
        rows = report.get("results")
        if not isinstance(rows, list) or "read_bandwidth" not in report:
            continue
        if str(report["model"]).startswith(CONTROLS):
            continue
        machine = str(report.get("gpu") or report.get("machine", {}).get("processor", "unknown"))
        # The format of the layers, which have most of the weights; older reports have one for all.
        backend, dtype = (
            str(report.get("backend")),
            str(report.get("formats", {}).get("down", report.get("dtype"))),
        )
        known = find_model(str(report["model"]))
        model = known.name if known is not None else str(report["model"])
        for row in rows:
            speed = row["tokens_per_second"]["median"]
            found.append(
                Point(
                    f"Monotape, {backend}", model, machine, dtype, row["context"], speed,
                    row["bandwidth_share"], f"reports/{name}", own=True,
                )
            )  # fmt: skip
    return tuple(found)


def peer_points() -> tuple[Point, ...]:
    """The peers' measured points, with their share of the same ceiling."""
    data = table("peers")
    found = []
    for row in data["decode"]:
        known, gpu = models()[row["model"]], find_gpu(row["gpu"])
        load = Load(
            shape_from_config(known.config), precision_for(row["dtype"], known.config), kv_bytes_for("bf16")
        )
        assert gpu.measured_tbs is not None, "peers were measured where the bandwidth was"
        ceiling = tokens_per_second(gpu.measured_tbs * TERA, load.pass_bytes(row["context"]))
        speed = row["tokens_per_second"]
        found.append(
            Point(
                row["label"], row["model"], gpu.name, row["dtype"], row["context"], speed, speed / ceiling,
                data["conditions"], own=False,
            )
        )  # fmt: skip
    return tuple(found)


def built_in_points() -> tuple[Point, ...]:
    """What reports/ held when this version was made: an installed package has no reports beside it."""
    return tuple(Point(**row) for row in table("measured")["points"])


def built_in_table(reports: dict[str, dict[str, Any]]) -> str:
    """The data file behind `built_in_points` and `built_in_times`; `python bench/index.py` writes it."""
    points, times = (
        ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
        for rows in (own_points(reports), timed(reports))
    )
    return f'{{"made_by": "python bench/index.py", "points": [\n{points}\n], "times": [\n{times}\n]}}\n'


def cpu_shares(points: Iterable[Point]) -> tuple[list[tuple[int, float]], str]:
    """(context, share of the read bandwidth that this engine reaches on CPUs): medians, and where they are from."""
    shares: dict[int, list[float]] = {}
    where: dict[str, None] = {}
    for point in points:
        if point.label == "Monotape, cpu":
            shares.setdefault(point.context, []).append(point.share)
            where[f"{point.model} in {point.dtype} on {point.machine}, {point.source}"] = None
    if not shares:
        raise UsageError(
            "No report holds a decode speed of the CPU engine.", "Run `python bench/decode.py --save` first."
        )
    return [(context, median(found)) for context, found in sorted(shares.items())], "; ".join(where)


def measured_here(box: Box, model: str, dtype: str) -> tuple[Point, ...]:
    """What this engine was measured to do with this model, in this format, on one such device."""
    return tuple(point for point in points_for(box, model, dtype, {}, built_in_points()) if point.own)


def points_for(
    box: Box, model: str, dtype: str, reports: dict[str, dict[str, Any]], more: tuple[Point, ...] = ()
) -> tuple[Point, ...]:
    """What was measured of this model, in this format, on one such device."""
    wanted = (box.gpu.name, model, dtype)
    points = (*peer_points(), *own_points(reports), *more) if box.count == 1 else ()
    return tuple(point for point in points if (point.machine, point.model, point.dtype) == wanted)
