"""What tests know about processes that are not their children, from /proc."""

from __future__ import annotations

import time
from pathlib import Path

import pytest


def need_proc() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("processes are found in /proc, which this system does not have")


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended may stay in the list until its new parent looks."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(pid: int) -> dict[int, str]:
    """The children of a process, whichever thread started them, and their command lines."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def descendants(pid: int) -> dict[int, str]:
    """Its children and theirs, and so on."""
    found = children(pid)
    for child in list(found):
        found |= descendants(child)
    return found


def wait_for_end(*pids: int, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"{left} still there"
        time.sleep(0.02)
