"""What tests know about processes that are not their children, from /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from waiting import until


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
    return _commands(child for child, parent in _parents().items() if parent == pid)


def descendants(pid: int) -> dict[int, str]:
    """Its children and theirs, and so on."""
    parents = _parents()
    found: set[int] = set()
    new = {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= new
    return _commands(found)


def _parents() -> dict[int, int]:
    """Of every process. One look at each is many times quicker than the lists of children that its threads have."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def _commands(pids: Iterable[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_for_end(*pids: int) -> None:
    until(lambda: not any(map(alive, pids)), lambda: f"the end of {list(filter(alive, pids))}")


def listening(*pids: int) -> set[tuple[str, int]]:
    """The addresses on which processes listen, as /proc/net writes them, and the ports."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(link.readlink().name)
            except FileNotFoundError:  # closed meanwhile
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found
