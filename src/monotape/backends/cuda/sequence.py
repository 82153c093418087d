"""The KV of one conversation on the GPU. It starts small and grows with the conversation."""

from __future__ import annotations

from typing import Any

from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.protocol import KvSequence
from monotape.plan.gpu import UNIT_POSITIONS, KvUnits

_STEP_UNITS = 64  # growing by at least 2,048 positions keeps growing rare


class CudaSequence:
    """[layers][kv heads][units of 32 positions]"""

    def __init__(self, kv: KvUnits, context: int) -> None:
        self.length = 0
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
        memory = DeviceMemory(self._heads * units * self._unit_bytes)
        if self._memory is not None and self.length:
            memory.fill(0)
            self._copy_into(memory, units)
        else:
            memory.fill(0, stream)
        self._memory, self.units = memory, units

    def shrink(self) -> bool:
        """Gives back the units that were reserved and not used, where they are more than half; says whether it did."""
        units = -(-self.length // UNIT_POSITIONS)
        if self._memory is None or not units or 2 * units >= self.units:
            return False
        memory = DeviceMemory(self._heads * units * self._unit_bytes)
        self._copy_into(memory, units)
        self._memory, self.units = memory, units
        return True

    def _copy_into(self, memory: DeviceMemory, units: int) -> None:
        """As many units of each head as both have room for."""
        assert self._memory is not None
        old, new = self.units * self._unit_bytes, units * self._unit_bytes
        memory.copy_rows(self._memory, old, new, min(old, new), self._heads)
