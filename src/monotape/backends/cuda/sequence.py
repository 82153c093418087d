"""The KV of one conversation on the GPU. It starts small and grows with the conversation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory, memory_free_and_total, on_device
from monotape.backends.protocol import KvSequence
from monotape.errors import ResourceError
from monotape.plan.gpu import UNIT_POSITIONS, KvUnits

_STEP_UNITS = 64  # growing by at least 2,048 positions keeps growing rare


class CudaSequence:
    """[layers][kv heads][units of 32 positions]"""

    def __init__(self, kv: KvUnits, context: int, device: int = 0) -> None:
        """`device`: the GPU that has its memory, whichever is the thread's when it grows."""
        self.length = 0
        self._device = device
        self._heads = kv.layers * kv.kv_heads
        self._unit_bytes = kv.unit_bytes
        self._most_units = -(-context // UNIT_POSITIONS)
        self.units = 0
        self._memory: DeviceMemory | None = None

    @property
    def bytes(self) -> int:
        return self._heads * self.units * self._unit_bytes

    @property
    def pointer(self) -> int:
        return self._memory.pointer if self._memory else 0

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length

    def copy_from(self, other: KvSequence, length: int) -> None:
        assert isinstance(other, CudaSequence) and self.length == 0 and length <= other.length
        self.reserve(length)
        assert self._memory is not None and other._memory is not None
        pitches = other.units * self._unit_bytes, self.units * self._unit_bytes
        width = -(-length // UNIT_POSITIONS) * self._unit_bytes
        self._memory.copy_rows(other._memory, *pitches, width, self._heads)
        self.length = length

    def clear(self) -> None:
        """Forgets everything, the memory too."""
        self.length = self.units = 0
        self._memory = None

    def reserve(self, positions: int, stream: Any = None) -> None:
        """Makes room for that many positions, for work that follows on `stream`; keeps the KV that is there.

        New memory is zeroed, because the kernel multiplies whole units: positions that it masks must hold numbers too.
        """
        wanted = -(-positions // UNIT_POSITIONS)
        assert wanted <= self._most_units
        if wanted <= self.units:
            return
        units = min(self._most_units, max(wanted, self.units * 2, _STEP_UNITS))
        if self._memory is None or not self.length:
            self.clear()  # an empty one needs no room beside its successor
        try:
            memory = self._new_memory(units)
        except ResourceError:
            units = wanted  # as much as it takes to go on
            if self._grow_alone(units):
                return
            memory = self._new_memory(units)
        if self._memory is None:
            memory.fill(0, stream)
        else:
            memory.fill(0)
            self._copy_into(memory, units)
        self._memory, self.units = memory, units

    def _new_memory(self, units: int) -> DeviceMemory:
        with on_device(self._device):
            return DeviceMemory(self._heads * units * self._unit_bytes)

    def _grow_alone(self, units: int) -> bool:
        """Grows where there is room for the new memory but not for the old one beside it: its KV waits on the host.

        A conversation of any length that was accepted can be reached so, however it got there. Says whether it did.
        """
        if self._memory is None:
            return False
        more = self._heads * (units - self.units) * self._unit_bytes
        with on_device(self._device):
            free, _ = memory_free_and_total()
        if not more <= free < more + self.bytes:
            return False
        rows = self._memory.read(np.empty((self._heads, self.units * self._unit_bytes), np.uint8))
        length, before = self.length, self.units
        self._memory.close()
        self.clear()
        try:
            self._put_back(rows, units, length)
        except ResourceError:  # another process has taken the room meanwhile
            self._put_back(rows, before, length)
            return False
        return True

    def _put_back(self, rows: NDArray[np.uint8], units: int, length: int) -> None:
        memory = self._new_memory(units)
        memory.fill(0)
        used = -(-length // UNIT_POSITIONS) * self._unit_bytes
        for head, row in enumerate(rows):
            memory.write(row[:used], head * units * self._unit_bytes)
        self._memory, self.units, self.length = memory, units, length

    def shrink(self) -> bool:
        """Gives back the units that were reserved and not used, where they are more than half; says whether it did."""
        units = -(-self.length // UNIT_POSITIONS)
        if self._memory is None or not units or 2 * units >= self.units:
            return False
        memory = self._new_memory(units)
        self._copy_into(memory, units)
        self._memory, self.units = memory, units
        return True

    def _copy_into(self, memory: DeviceMemory, units: int) -> None:
        """As many units of each head as both have room for."""
        assert self._memory is not None
        old, new = self.units * self._unit_bytes, units * self._unit_bytes
        memory.copy_rows(self._memory, old, new, min(old, new), self._heads)
