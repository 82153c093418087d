"""The KV of one conversation on the CPU: every rank has its own."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import KvSequence
from monotape.errors import ResourceError
from monotape.plan.formats import Format
from monotape.plan.types import KvLayout, Plan

Pointers = ctypes.Array[ctypes.c_void_p]

_GROWTH = 256  # positions; KV grows in steps of this


class RankKv:
    """One rank's keys and values, in arrays that grow when a request needs more positions."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._dtype = np.float32 if layout.format is Format.F32 else np.float16
        self.keys, self.values = self.empty(0), self.empty(0)

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def empty(self, capacity: int) -> NDArray[Any]:
        layout = self._layout
        return np.empty((layout.layers, layout.kv_heads, capacity, layout.head_dim), self._dtype)

    def moved(self, capacity: int, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies with room for `capacity` positions, of which the first `length` are those of now."""
        keys, values = self.empty(capacity), self.empty(capacity)
        keys[:, :, :length] = self.keys[:, :, :length]
        values[:, :, :length] = self.values[:, :, :length]
        return keys, values


class CpuSequence:
    """KV of one conversation: every rank has its own."""

    def __init__(self, plan: Plan) -> None:
        self.ranks = tuple(RankKv(rank.kv) for rank in plan.ranks)
        self._position_bytes = sum(rank.kv.position_bytes for rank in plan.ranks)
        self.length = 0
        self.capacity = 0

    @property
    def bytes(self) -> int:
        return sum(rank.bytes for rank in self.ranks)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length

    def copy_from(self, other: KvSequence, length: int) -> None:
        assert isinstance(other, CpuSequence) and self.length == 0 and length <= other.length
        self.reserve(length)
        for own, rank in zip(self.ranks, other.ranks, strict=True):
            own.keys[:, :, :length] = rank.keys[:, :, :length]
            own.values[:, :, :length] = rank.values[:, :, :length]
        self.length = length

    def reserve(self, positions: int) -> None:
        """Makes room for `positions`, keeping what is there."""
        if positions <= self.capacity:
            return
        try:
            self._move(_rounded(positions))
        except MemoryError as error:
            raise ResourceError(
                f"The KV of {positions} positions takes {positions * self._position_bytes:,} bytes, "
                "which this machine does not have.",
                "Ask for fewer tokens or set a smaller --max-model-len.",
            ) from error

    def shrink(self) -> bool:
        """Gives back the room that was reserved and not used, where it is more than half; says whether it was."""
        capacity = _rounded(self.length)
        if 2 * capacity >= self.capacity:
            return False
        self._move(capacity)
        return True

    def _move(self, capacity: int) -> None:
        """To arrays with that much room: those of all ranks, or of none where there is no memory for all of them."""
        moved = [rank.moved(capacity, self.length) for rank in self.ranks]
        for rank, (keys, values) in zip(self.ranks, moved, strict=True):
            rank.keys, rank.values = keys, values
        self.capacity = capacity

    def pointers(self) -> tuple[Pointers, Pointers]:
        """Where the ranks' keys and values lie; the arrays must outlive their use."""
        kind = ctypes.c_void_p * len(self.ranks)
        return (
            kind(*(rank.keys.ctypes.data for rank in self.ranks)),
            kind(*(rank.values.ctypes.data for rank in self.ranks)),
        )


def _rounded(positions: int) -> int:
    return -(-positions // _GROWTH) * _GROWTH
