"""How fast this machine reads memory: measured once, kept in the cache directory, the ceiling of every percentage."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass

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


def available_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_bandwidth(threads: int | None = None) -> Bandwidth:
    """Reads a gigabyte with all threads, several times; the best pass counts, because nothing can be too fast."""
    threads = threads or available_cpus()
    words = np.full(_BYTES // 8, 0x5A5A, dtype=np.uint64)
    best = library().monotape_read_bandwidth(words.ctypes.data, words.size, threads, _ROUNDS)
    return Bandwidth(best, threads, platform.machine())


def known_bandwidth(threads: int | None = None) -> Bandwidth:
    """The measured figure of this machine, from the cache if `monotape doctor` or an earlier run left it there."""
    threads = threads or available_cpus()
    path = cache_dir() / f"bandwidth-{platform.node()}-{threads}.json"
    try:
        return Bandwidth(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        found = measure_bandwidth(threads)
        remember_bandwidth(found)
        return found


def remember_bandwidth(found: Bandwidth) -> None:
    """Keeps a figure for later runs; a cache that cannot be written is no reason to fail."""
    path = cache_dir() / f"bandwidth-{platform.node()}-{found.threads}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(found)))
        os.replace(temporary, path)
    except OSError:
        return
