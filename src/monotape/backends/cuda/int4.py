"""INT4 in groups along k: rounding 16-bit weights to it, and how it lies on a GPU's tape (kernels/formats/int4.h)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import TILE_ROWS, Format
from monotape.weights.tapes import Bytes

BLOCK = 128  # values of k in a block
_MIDDLE = 8  # the code of 0 where there are no zero points
_GROUPS = {
    Format.INT4_G32: (32, False), Format.INT4_G64: (64, False), Format.INT4_G128: (128, False),
    Format.INT4_G32Z: (32, True), Format.INT4_G64Z: (64, True), Format.INT4_G128Z: (128, True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grouped:
    """(code - zero) * scale * row scale; k is whole blocks. Zeros are None where all are 8."""

    codes: NDArray[np.uint8]  # [rows, k]
    scales: NDArray[np.float16]  # [rows, groups]
    zeros: NDArray[np.float16] | None
    row_scales: NDArray[np.float32]  # powers of two

    def values(self) -> NDArray[np.float32]:
        group = self.codes.shape[1] // self.scales.shape[1]
        zeros = (
            np.float32(_MIDDLE)
            if self.zeros is None
            else np.repeat(self.zeros.astype(np.float32), group, axis=1)
        )
        scales = np.repeat(self.scales.astype(np.float32), group, axis=1)
        values: NDArray[np.float32] = (self.codes - zeros) * scales * self.row_scales[:, None]
        return values


def rounded(fmt: Format, values: NDArray[np.float32]) -> Grouped:
    """Each group by its own largest value, or by its range where the format has zero points."""
    group, has_zeros = _GROUPS[fmt]
    rows, k = values.shape
    padded = np.zeros((rows, -(-k // BLOCK) * BLOCK), np.float32)
    padded[:, :k] = values
    groups = padded.reshape(rows, -1, group)
    if has_zeros:
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        wanted = (high - low) / np.float32(15)
    else:
        wanted = np.abs(groups).max(axis=2) / np.float32(7)
    largest = wanted.max(axis=1)
    row_scales = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1)))).astype(np.float32)
    scales = (wanted / row_scales[:, None]).astype(np.float16)
    steps = scales.astype(np.float32) * row_scales[:, None]
    steps = np.where(steps > 0, steps, np.float32(1))
    zeros = np.rint(-low / steps).clip(0, 15) if has_zeros else np.full(wanted.shape, _MIDDLE)
    codes = np.rint(groups / steps[..., None] + zeros[..., None]).clip(0, 15).astype(np.uint8)
    return Grouped(
        codes.reshape(padded.shape), scales, zeros.astype(np.float16) if has_zeros else None, row_scales
    )


def pack(grouped: Grouped, out: Bytes) -> None:
    """Rows, as many as `out` has tiles for. The tiles of `out` may lie apart."""
    tiles, blocks = out.shape[0], grouped.codes.shape[1] // BLOCK
    # [tile, row, block, group of 32, column, n, half]: values 2 n and 2 n + 1 of the lane's eight
    codes = grouped.codes.reshape(tiles, TILE_ROWS, blocks, 4, 4, 4, 2).astype(np.uint32)
    shifts = 4 * (np.arange(4)[:, None] + 4 * np.arange(2)).astype(np.uint32)
    words = np.bitwise_or.reduce(np.bitwise_or.reduce(codes << shifts, axis=-1), axis=-1)
    lanes = words.transpose(0, 2, 1, 4, 3).reshape(tiles, blocks, -1).view(np.uint8)
    kept = [grouped.scales] if grouped.zeros is None else [grouped.scales, grouped.zeros]
    strip = np.stack([part.reshape(tiles, TILE_ROWS, blocks, -1) for part in kept], axis=-1)
    strips = np.ascontiguousarray(strip.transpose(0, 2, 1, 3, 4)).reshape(tiles, blocks, -1).view(np.uint8)
    out.reshape(tiles, blocks, -1)[:] = np.concatenate([lanes, strips], axis=2)
