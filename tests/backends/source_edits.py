"""Lines of the kernel that a test changes: kernels built after that have the changed ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends import host_kernel


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the kernel, and what stands in its place."""

    file: str
    line: str
    instead: str = ""


def put(line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kernels for the host's machine are built with the line changed."""
    kernels = Path(shutil.copytree(host_kernel.KERNELS, folder / "kernels"))
    text = (kernels / line.file).read_text()
    assert text.count(line.line) == 1, f"{line.file} has other lines now"
    (kernels / line.file).write_text(text.replace(line.line, line.instead))
    monkeypatch.setattr(host_kernel, "KERNELS", kernels)
