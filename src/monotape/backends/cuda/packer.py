"""Lays rows out as kernels/matrix.h reads them: a tile is blocks of 8 rows and 32 values, each block row after row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.plan.types import TILE_ROWS, Format
from monotape.weights.tapes import Bytes

BLOCK_K = 32


class BlockPacker:
    """bf16 tiles for the tensor cores."""

    def pack(self, fmt: Format, rows: NDArray[np.float32], out: Bytes) -> int:
        assert fmt is Format.BF16
        bad = ~np.isfinite(rows).all(axis=1)
        if bad.any():
            return int(np.flatnonzero(bad)[0])
        count, k = rows.shape
        halves = to_bf16(rows).reshape(count // TILE_ROWS, TILE_ROWS, k // BLOCK_K, BLOCK_K)
        out[:] = (
            np.ascontiguousarray(halves.transpose(0, 2, 1, 3)).reshape(count // TILE_ROWS, -1).view(np.uint8)
        )
        return -1

    def pack_integers(self, integers: NDArray[np.int8], scales: NDArray[np.float16], out: Bytes) -> int:
        raise AssertionError("only q8 tapes hold integers")


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
