"""What every benchmark ends with: one JSON line, and a file under reports/ that says how its numbers came about."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bare_code import bare_code

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"
#: The code that decides how fast a backend, or the server, is. A report of a CPU or of the server belongs to one state
#: of it, one of a GPU to the machine code of its kernels.
MEASURED_SOURCES = {
    "cpu": ("src/monotape/backends/cpu", "src/monotape/plan", "src/monotape/compiler"),
    "cuda": (
        "src/monotape/backends/cuda",
        "src/monotape/kernels",
        "src/monotape/plan",
        "src/monotape/compiler",
    ),
    "server": ("src/monotape/server",),
}


def sources_hash(measured: str = "cpu") -> str:
    """Names the state of the code that is measured, comments aside: kernel sources and plan code, or the server's."""
    digest = hashlib.sha256()
    for folder in MEASURED_SOURCES[measured]:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp", ".cu"):
                digest.update(f"{path.relative_to(ROOT)}\0{bare_code(path)}".encode())
    return digest.hexdigest()[:16]


def kind_of(report: Mapping[str, Any]) -> str:
    """Which of the MEASURED_SOURCES a report is about."""
    if "gpu" in report:
        return "cuda"
    return "server" if str(report.get("name", "")).startswith("serve-") else "cpu"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "architecture": platform.machine(),
        "processor": _cpu_name(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    for command in (["lscpu"], ["sysctl", "machdep.cpu.brand_string"]):
        try:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError):
            continue
        for line in lines:
            if line.startswith(("Model name:", "machdep.cpu.brand_string:")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _portable(argument: str) -> str:
    """A path without the folders that only this machine has."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def command_line() -> str:
    """How this program was called."""
    return shlex.join(["python", *map(_portable, sys.argv)])


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # a machine with the sources alone
        return ""
    return result.stdout.strip()


def commit() -> dict[str, Any]:
    """The commit. Where sources are measured without their history MONOTAPE_COMMIT says it, with a + if not clean."""
    told = os.environ.get("MONOTAPE_COMMIT", "")
    if told:
        return {"commit": told.rstrip("+"), "uncommitted_changes": told.endswith("+")}
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return {"commit": _git("rev-parse", "HEAD") or "unknown", "uncommitted_changes": changed}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and spread of a list of measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def publish(name: str, results: dict[str, Any], *, save: bool, measured: str | None = None) -> None:
    """Prints the one JSON line, and keeps it under reports/ when asked to.

    A report of a GPU names it in `gpu`, and in `kernels` the machine code that ran (machine_code.py); others name the
    state of the sources.
    """
    assert ("gpu" in results) == ("kernels" in results), "a report of a GPU names its kernels"
    measured = measured or "cpu"
    code = {} if "gpu" in results else {"sources": _AT_START["sources"][measured]}
    report = {
        "name": name,
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_AT_START["commit"],
        **code,
        "machine": machine(),
        **results,
    }
    if save:
        REPORTS.mkdir(exist_ok=True)
        (REPORTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


#: Taken when the benchmark starts: what is edited while it runs is not what it measured.
_AT_START: dict[str, Any] = {
    "commit": commit(),
    "sources": {measured: sources_hash(measured) for measured in MEASURED_SOURCES},
}
