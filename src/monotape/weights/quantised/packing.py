"""Integers of 4 or 8 bits out of 32-bit words, packed along the rows or along the columns of a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Words = NDArray[np.int32]

#: The column, of the eight that share a word, whose value the nibble at bits 4 i holds.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def nibbles(packed: Codes) -> Codes:
    """Rows of bytes as rows of nibbles, the low one of a byte first."""
    pairs = packed.astype("<u2")
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)  # whole words at a time, which the processor does many at once
    return pairs.view(np.uint8)


def along_columns(words: Words, bits: int) -> Codes:
    """[rows, words] as [rows, values], the lowest bits first."""
    flat = _bytes(words).reshape(words.shape[0], 4 * words.shape[1])
    return flat if bits == 8 else nibbles(flat)


def transposed(words: Words, bits: int, order: Sequence[int] | None = None) -> Codes:
    """[rows, words] as [values, rows], the lowest bits first, or 4-bit values in the order given.

    Packed bytes are transposed, not the values, of which there are more.
    """
    rows, count = words.shape
    planes = np.ascontiguousarray(_bytes(words).transpose(1, 2, 0))  # [words, 4, rows]
    if bits == 8:
        return planes.reshape(4 * count, rows)
    found = np.empty((count, 8, rows), np.uint8)
    for index, place in enumerate(range(8) if order is None else order):
        byte = planes[:, index // 2]
        found[:, place] = byte >> np.uint8(4) if index % 2 else byte & np.uint8(0x0F)
    return found.reshape(8 * count, rows)


def _bytes(words: Words) -> Codes:
    """The four bytes of each word, the lowest first: files are little-endian."""
    return np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)
