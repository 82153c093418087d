"""How 16-bit weights lie on a GPU's tape: a tile is blocks of 8 rows and 32 values, each block row after row.

Weights that are stored in the tape's own format are only moved, 64 bytes at a time; all others are rounded first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import TILE_ROWS, Format
from monotape.weights.tapes import Bytes

BLOCK_K = 32
Halves = NDArray[np.uint16]
_BLOCK_ROW = np.dtype(f"V{2 * BLOCK_K}")  # one row of a block as one item: twice as fast to move as 32 values
_SIGN = 0x8000
#: The exponent of an infinity or a NaN, which no finite number has.
EXPONENT = {Format.BF16: 0x7F80, Format.F16: 0x7C00}


def pack_blocks(halves: Halves, out: Bytes) -> None:
    """Rows, as many as `out` has tiles for, to tiles. The tiles of `out` may lie apart."""
    tiles, blocks = out.shape[0], halves.shape[1] // BLOCK_K
    source = halves.view(_BLOCK_ROW).reshape(tiles, TILE_ROWS, blocks)
    target = out.view(_BLOCK_ROW).reshape(tiles, blocks, TILE_ROWS)
    target[:] = source.transpose(0, 2, 1)


#: How rows of 16-bit values become tiles, by the format of the tape.
PACKERS: dict[Format, Callable[[Halves, Bytes], None]] = {
    Format.BF16: pack_blocks,
    Format.F16: pack_blocks,
}


def first_not_finite(fmt: Format, halves: Halves) -> int:
    """The first row with an infinity or a NaN, or -1.

    Read as integers, those of either sign are greater than every finite number of that sign, so two maxima decide.
    """
    exponent = EXPONENT[fmt]
    if halves.max(initial=0) < _SIGN + exponent and halves.view(np.int16).max(initial=0) < exponent:
        return -1
    bad = ((halves & np.uint16(exponent)) == exponent).any(axis=1)
    return int(np.flatnonzero(bad)[0])


def to_halves(fmt: Format, rows: NDArray[np.float32]) -> Halves:
    """Rounded to nearest even. Values that are not finite, or too large, become an infinity of the format."""
    if fmt is Format.F16:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.where(np.isnan(rows), np.float32(np.inf), rows).astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    rounded[np.isnan(rows)] = EXPONENT[Format.BF16]  # rounding a NaN's bits may carry into its sign
    return rounded
