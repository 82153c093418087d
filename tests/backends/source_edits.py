"""Lines of the kernel that a test changes: kernels built after that have the changed ones."""

from __future__ import annotations

import shutil
import tempfile
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

    def __post_init__(self) -> None:
        """At import, so that a change of the kernel is told by the next run of any test, and not by the long ones."""
        if self.file:
            count = (host_kernel.KERNELS / self.file).read_text().count(self.line)
            assert count == 1, f"{self.file} has this {count} times: {self.line!r}"


def resting(worker: str, warp: int, where: str, after: Line) -> Line:
    """A place where one warp rests, longer than the others take for a layer.

    For races in which one warp has to be late at one place: hardly any order has it late just there.
    """
    there = f"worker_number() == {worker} && c.warp() == {warp} && {where}"
    return Line(
        after.file, after.line, f"{after.line}if ({there}) for (int i = 0; i < 100; i++) rest(1000);\n"
    )


def late_sums(warp: int) -> Line:
    """A warp of the last worker reads the sums of qkv late."""
    after = Line("token/matrix.h", "    c.trace.part_ends(kMet);\n")
    return resting("kWorkers - 1", warp, "matrix.stage == kFirstStage", after)


def late_parts(worker: int) -> Line:
    """A worker's first warp combines late what its warps have heard of the parts of a head."""
    line = "      const int quad = smaller(c.lane(), kHeadDim / 4 - 1);  // all lanes: they shuffle\n"
    return resting(str(worker), 0, "true", Line("token/combine.h", line))


def late_writer() -> Line:
    """The thread that writes the rows of the next pass is late."""
    return resting("0", 0, "true", Line("sampling/offers.h", "    Drafts& drafts = c.shared.drafts;\n"))


def late_reader(warp: int) -> Line:
    """A warp compares its first row with the draft after it late."""
    line = "    token = p.sampling.active ? c.shared.next_token : c.shared.drafts.chosen[row];\n"
    return resting("0", warp, "row == 0", Line("monotape.cu", line))


def put(line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kernels for the host's machine are built with the line changed, besides those put before."""
    place = tempfile.mkdtemp(dir=folder)
    kernels = Path(shutil.copytree(host_kernel.KERNELS, place, dirs_exist_ok=True))
    text = (kernels / line.file).read_text()
    (kernels / line.file).write_text(text.replace(line.line, line.instead))
    monkeypatch.setattr(host_kernel, "KERNELS", kernels)
