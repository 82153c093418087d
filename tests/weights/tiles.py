"""The layout of a tile, written a second time in NumPy, so that packing can be checked against something."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import TILE_ROWS, Format


def unpack_tiles(fmt: Format, tiles: NDArray[np.uint8], padded_k: int) -> NDArray[np.float32]:
    """Tiles (one a row of bytes) back to rows of float32."""
    count = tiles.shape[0]
    if fmt is Format.Q8:
        blocks = tiles.reshape(count, padded_k // 32, TILE_ROWS * 34)
        scales = blocks[:, :, : 2 * TILE_ROWS].copy().view(np.float16).astype(np.float32)
        integers = blocks[:, :, 2 * TILE_ROWS :].copy().view(np.int8).reshape(count, -1, 8, TILE_ROWS, 4)
        values = integers.astype(np.float32) * scales[:, :, None, :, None]
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2, 4).reshape(count * TILE_ROWS, padded_k))
    if fmt is Format.BF16:
        wide = (tiles.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = tiles.copy().view(np.float32 if fmt is Format.F32 else np.float16).astype(np.float32)
    by_lane = wide.reshape(count, padded_k, TILE_ROWS).transpose(0, 2, 1)
    return np.ascontiguousarray(by_lane.reshape(count * TILE_ROWS, padded_k))
