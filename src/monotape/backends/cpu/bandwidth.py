"""How fast this machine reads memory: the best that was ever measured, kept in the cache directory with its date.

It is the ceiling of every percentage. A machine with other work to do gives a lower figure, and a share of that would
flatter: so a figure is only ever replaced by a better one, or when the user forgets it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from monotape.backends.cpu.bridge import library
from monotape.config import cache_dir

_BYTES = 1 << 30  # more than any last-level cache holds, shared server caches included
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second that `threads` threads read together."""

    bytes_per_second: float
    threads: int
    machine: str
    date: str = ""  # like 2026-11-16; figures of earlier versions have none


def available_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_bandwidth(threads: int | None = None) -> Bandwidth:
    """Reads a gigabyte with all threads, several times; the best pass counts, because nothing can be too fast."""
    threads = threads or available_cpus()
    words = np.full(_BYTES // 8, 0x5A5A, dtype=np.uint64)
    best = library().monotape_read_bandwidth(words.ctypes.data, words.size, threads, _ROUNDS)
    return Bandwidth(best, threads, platform.machine(), time.strftime("%Y-%m-%d"))


def known_bandwidth(threads: int | None = None) -> Bandwidth:
    """The best figure of this machine so far; it is measured if there is none."""
    threads = threads or available_cpus()
    return kept_bandwidth(threads) or remember_bandwidth(measure_bandwidth(threads))


def kept_bandwidth(threads: int | None = None) -> Bandwidth | None:
    """The best figure that `monotape doctor` or an earlier run left in the cache."""
    path = _path(threads or available_cpus())
    try:
        found = Bandwidth(**json.loads(path.read_text("utf-8")))
        return found if found.bytes_per_second > 0 else None
    except (OSError, ValueError, TypeError):
        return None


def remember_bandwidth(found: Bandwidth) -> Bandwidth:
    """Keeps a figure unless a better one is kept already; the better one is returned.

    A cache that cannot be written is no reason to fail.
    """
    kept = kept_bandwidth(found.threads)
    if kept is not None and kept.bytes_per_second >= found.bytes_per_second:
        return kept
    path = _path(found.threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(found)), "utf-8")
        os.replace(temporary, path)
    except OSError:
        pass
    return found


def forget_bandwidth() -> None:
    """For a machine that has become another: other memory, or a limit on it."""
    _path(available_cpus()).unlink(missing_ok=True)


def _path(threads: int) -> Path:
    return cache_dir() / f"bandwidth-{platform.node()}-{threads}.json"
