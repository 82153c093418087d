"""How long a sum over ranks takes on this GPU, measured by a kernel of its own, beside a plain barrier."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory, Kernel, compile_kernel, processors
from monotape.errors import BackendError

KERNEL_NAME = "monotape_collective"
THREADS = 320
_SHARED_BYTES = 200 << 10  # so much that every block has a multiprocessor to itself
_WARM_UP = 100  # rounds that are not counted


class CollectiveStruct(ctypes.Structure):
    """kernels/collective.cu: CollectiveParams"""

    _fields_ = (
        *((name, c_void_p) for name in ("inbox", "sums", "ticks", "times_ns", "counter", "failed")),
        *((name, c_int32) for name in ("elements", "blocks", "rounds", "barrier")),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rounds:
    """Microseconds of each round: that of the block which took longest."""

    microseconds: NDArray[np.float64]

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.microseconds, percent))


def header(ranks: int) -> str:
    """What the machine header and the kernel want to know."""
    return (
        "#pragma once\nnamespace monotape {\n"
        f"constexpr bool kFloat16 = false;\nconstexpr int kRanks = {ranks};\n}}  // namespace monotape\n"
    )


def blocks_of(ranks: int) -> int:
    """SMs per rank when `ranks` ranks share one GPU."""
    return processors() // ranks


class Collective:
    """Sums among ranks that share this GPU."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.blocks = ranks, blocks_of(ranks)
        self._kernel = Kernel(compile_kernel(header(ranks), "collective.cu"), KERNEL_NAME, _SHARED_BYTES)

    def sum(self, elements: int, rounds: int = 2000) -> Rounds:
        """Sums of `elements` float32 values, one after another; the result is checked to the last bit."""
        assert -(-elements // self.blocks) <= THREADS, f"{elements} values for {self.blocks} blocks"
        times, sums = self._run(elements, rounds, barrier=False)
        if not np.array_equal(sums, expected_sums(self.ranks, elements)):
            raise BackendError("A sum over ranks is wrong.", "This is a fault in Monotape; please report it.")
        return times

    def barrier(self, rounds: int = 2000) -> Rounds:
        """All blocks of all ranks raise a counter and wait until it is complete."""
        return self._run(1, rounds, barrier=True)[0]

    def _run(self, elements: int, rounds: int, *, barrier: bool) -> tuple[Rounds, NDArray[np.float32]]:
        total, rounds = self.blocks * self.ranks, rounds + _WARM_UP
        sizes = {
            "inbox": 8 * self.ranks * 2 * self.ranks * elements, "sums": 4 * self.ranks * elements,
            "ticks": 8 * total * (rounds + 1), "times_ns": 16 * total, "counter": 4, "failed": 4,
        }  # fmt: skip
        memories = {name: DeviceMemory(count) for name, count in sizes.items()}
        params = CollectiveStruct(elements=elements, blocks=self.blocks, rounds=rounds, barrier=barrier)
        try:
            for name, memory in memories.items():
                memory.fill(0)
                setattr(params, name, memory.pointer)
            self._kernel.launch(total, THREADS, params)
            self._kernel.wait()
            if memories["failed"].read(np.empty(1, np.uint32))[0]:
                raise BackendError("Ranks waited too long for each other.", "This is a fault in Monotape.")
            ticks = memories["ticks"].read(np.empty((total, rounds + 1), np.int64))
            times_ns = memories["times_ns"].read(np.empty((total, 2), np.int64))
            sums = memories["sums"].read(np.empty((self.ranks, elements), np.float32))
        finally:
            for memory in memories.values():
                memory.close()
        return rounds_of(ticks, times_ns), sums


def rounds_of(ticks: NDArray[np.int64], times_ns: NDArray[np.int64]) -> Rounds:
    """[blocks][rounds + 1] ticks of each block's own clock, and when each began and ended by the clock of all."""
    per_tick = np.median((times_ns[:, 1] - times_ns[:, 0]) / (ticks[:, -1] - ticks[:, 0]))
    lengths = np.diff(ticks, axis=1).max(axis=0)[_WARM_UP:]
    return Rounds(lengths * per_tick / 1e3)


def expected_sums(ranks: int, elements: int) -> NDArray[np.float32]:
    """Rank r starts from r + 1 + i in element i; every round leaves the mean, and all means are the same."""
    values = (
        np.arange(elements, dtype=np.float32)[None, :] + np.arange(1, ranks + 1, dtype=np.float32)[:, None]
    )
    for _ in range(2):
        total = np.zeros(elements, np.float32)
        for row in values:
            total = total + row
        values = np.tile(total / np.float32(ranks), (ranks, 1))
    return values
