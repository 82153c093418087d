"""How busy a machine is with other work, asked while a benchmark itself does nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (
    0,
    1,
    2,
    5,
    6,
    7,
)  # user, nice, system, irq, softirq, steal; the others are idle, or counted in these


def busy_cores(seconds: float = 1.0) -> float | None:
    """Cores that other processes and other guests of the host took; None where the system does not say."""
    if not _STAT.is_file():
        return None
    before = _busy_seconds(_STAT.read_text())
    start = time.monotonic()
    time.sleep(seconds)
    return (_busy_seconds(_STAT.read_text()) - before) / (time.monotonic() - start)


def _busy_seconds(stat: str) -> float:
    """Of all cores since the machine started, from the first line of /proc/stat."""
    counts = [int(word) for word in stat.split("\n", 1)[0].split()[1:]]
    return sum(counts[index] for index in _BUSY) / os.sysconf("SC_CLK_TCK")
