"""What is built in: every GPU with its figures and sources, every model with its count beside the published one."""

from __future__ import annotations

import dataclasses
from typing import Any

from monotape.planner.accounting import shape_from_config
from monotape.planner.catalogue import gpus, models
from monotape.planner.text import columns, count


def list_json() -> dict[str, Any]:
    return {
        "gpus": {name: dataclasses.asdict(gpu) for name, gpu in gpus().items()},
        "models": {name: _model(name) for name in models()},
    }


def _model(name: str) -> dict[str, Any]:
    known, shape = models()[name], shape_from_config(models()[name].config)
    return {
        "architecture": shape.architecture, "total": shape.total, "active": shape.active,
        "published_total": known.published_total, "published_active": known.published_active,
        "published_source": known.published_source, "difference": shape.total / known.published_total - 1,
        "exception": known.exception, "notes": list(shape.notes), "config_source": known.source,
    }  # fmt: skip


def list_text() -> str:
    lines = ["GPU             GB       TB/s  source"]
    for name, gpu in gpus().items():
        memory = "-" if gpu.memory_gb is None else f"{gpu.memory_gb:g}"
        bandwidth = "-" if gpu.bandwidth_tbs is None else f"{gpu.bandwidth_tbs:.3f}"
        lines += columns(f"{name:<13}{memory:>5}{bandwidth:>11}  ", gpu.source, 32)
    heading = f"{'model':<40}{'counted':>12}{'published':>12}{'':>7}{'active':>11}  published size is from"
    lines += ["", heading]
    for name in models():
        row = _model(name)
        label = f"{name:<40}{count(row['total']):>12}{count(row['published_total']):>12}{row['difference']:>+7.1%}"
        exception = f"; EXCEPTION: {row['exception']}" if row["exception"] else ""
        lines += columns(f"{label}{count(row['active']):>11}  ", row["published_source"] + exception, 84)
    return "\n".join(lines) + "\n"
