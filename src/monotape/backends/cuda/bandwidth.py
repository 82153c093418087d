"""How fast the GPU reads its memory, measured by a kernel of its own: the ceiling of every percentage."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory, Kernel, compile_kernel, device_name, processors
from monotape.config import cache_dir

BUFFER_BYTES = 4 << 30  # many times what the L2 holds
ROUNDS = 2  # passes over the buffer in one launch
REPEATS = 3
#: (bytes of a copy, copies in flight) of a block. The best counts: nothing can be too fast.
SHAPES = ((16 << 10, 8), (16 << 10, 13), (32 << 10, 4), (32 << 10, 6))
#: machine/hopper.h wants to know what halves are; nothing here multiplies any.
HEADER = "#pragma once\nnamespace monotape {\nconstexpr bool kFloat16 = false;\n}  // namespace monotape\n"
_THREADS = 32


class BandwidthStruct(ctypes.Structure):
    """kernels/bandwidth.cu: BandwidthParams"""

    _fields_ = (
        ("source", ctypes.c_void_p), ("times_ns", ctypes.c_void_p), ("block_bytes", ctypes.c_int64),
        ("page_bytes", ctypes.c_int32), ("pages", ctypes.c_int32), ("rounds", ctypes.c_int32),
    )  # fmt: skip


def measure_bandwidth(buffer_bytes: int = BUFFER_BYTES) -> float:
    """Bytes per second of the fastest of several launches."""
    blocks = processors()
    kernel = Kernel(
        compile_kernel(HEADER, "bandwidth.cu"),
        "monotape_bandwidth",
        max(size * pages for size, pages in SHAPES),
    )
    largest = max(size for size, _ in SHAPES)
    block_bytes = buffer_bytes // blocks // largest * largest
    source, times = DeviceMemory(blocks * block_bytes), DeviceMemory(16 * blocks)
    source.fill(1)
    best = 0.0
    for _ in range(REPEATS):
        for page_bytes, pages in SHAPES:
            params = BandwidthStruct(source.pointer, times.pointer, block_bytes, page_bytes, pages, ROUNDS)
            kernel.launch(blocks, _THREADS, params)
            kernel.wait()
            moments = times.read(np.empty((blocks, 2), np.int64))
            best = max(best, ROUNDS * blocks * block_bytes / seconds_of(moments))
    source.close()
    times.close()
    return best


def seconds_of(moments: NDArray[np.int64]) -> float:
    """From the first block's start to the last one's end."""
    return float(moments[:, 1].max() - moments[:, 0].min()) / 1e9


def known_bandwidth() -> float:
    """The measured figure of this GPU, from the cache if `monotape doctor` or an earlier run left it there."""
    try:
        return float(json.loads(_path().read_text("utf-8"))["bytes_per_second"])
    except (OSError, ValueError, TypeError, KeyError):
        found = measure_bandwidth()
        remember_bandwidth(found)
        return found


def remember_bandwidth(found: float) -> None:
    """Keeps a figure for later runs; a cache that cannot be written is no reason to fail."""
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"bytes_per_second": found, "machine": device_name()}), "utf-8")
        os.replace(temporary, path)
    except OSError:
        return


def _path() -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in device_name().lower())
    return cache_dir() / f"bandwidth-{name}.json"
