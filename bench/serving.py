"""A server for a benchmark, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO

from report import ROOT


@contextlib.contextmanager
def served_by(program: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """A program of Python's that serves until it is ended: the server's address, and its process."""
    paths = [str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert process.stderr is not None
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_log, args=(process.stderr, found), daemon=True).start()
    try:
        address = found.get()
        assert address, "the server ended before it was ready"
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def _read_log(log: IO[str], found: queue.SimpleQueue[str]) -> None:
    """Finds the address in a server's log. It is read to its end: a full pipe would stop the server."""
    with log:
        for line in log:
            if " is ready at " in line:
                found.put(line.split()[-1])
    found.put("")
