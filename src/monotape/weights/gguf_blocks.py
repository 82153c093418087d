"""GGUF's stored blocks as numbers: exact float32 for every format, exact integers where there are any."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Formats that are one f16 scale and 32 signed integers a block: bytes a block, and the bits of an integer.
_INTEGER_BLOCKS = {"q8_0": (34, 8), "q5_0": (22, 5), "q4_0": (18, 4)}
BLOCK = 32


def dequantise(raw: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    """Rows of stored bytes as rows of float32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # Scales may be infinite or NaN in a damaged file; check.require_finite reports those with their row.
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType(kind))
    # For float32 the package gives a view of the map, which must not outlive a release of its pages.
    return values.copy() if kind == GGMLQuantizationType.F32 else values


def integers(raw: NDArray[np.uint8], stored: str) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
    """Rows of stored bytes as int8 and one f16 scale per 32 values; None where there are none."""
    if stored not in _INTEGER_BLOCKS:
        return None
    block_bytes, bits = _INTEGER_BLOCKS[stored]
    rows, count = raw.shape[0], raw.shape[1] // block_bytes
    blocks = raw.reshape(rows, count, block_bytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").reshape(rows, count)
    if bits == 8:
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    else:
        nibbles = blocks[..., -BLOCK // 2 :]
        # The first 16 values of a block are the low halves of its bytes, the others the high halves.
        values = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)
        if bits == 5:
            fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
            values |= fifth << 4
        values = values.view(np.int8)
        values -= 1 << (bits - 1)
    return values.reshape(rows, count * BLOCK), scales
