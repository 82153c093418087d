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
    found = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 0x0F, out=found[..., 0])
    np.right_shift(packed, 4, out=found[..., 1])
    return found.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def along_columns(words: Words, bits: int, order: Sequence[int] | None = None) -> Codes:
    """[rows, words] as [rows, values], the lowest bits first, or in the order given."""
    rows, count = words.shape
    pieces = _bytes(words)
    if order is None:
        flat = pieces.reshape(rows, 4 * count)
        return flat if bits == 8 else nibbles(flat)
    found = np.empty((rows, count, len(order)), np.uint8)
    for index, column in enumerate(order):
        found[:, :, column] = _value(pieces, bits, index)
    return found.reshape(rows, count * len(order))


def along_rows(words: Words, bits: int) -> Codes:
    """[words, columns] as [values, columns], the lowest bits first."""
    count, columns = words.shape
    pieces, per_word = _bytes(words), 32 // bits
    found = np.empty((count, per_word, columns), np.uint8)
    for index in range(per_word):
        found[:, index] = _value(pieces, bits, index)
    return found.reshape(count * per_word, columns)


def _bytes(words: Words) -> Codes:
    """The four bytes of each word, the lowest first: files are little-endian."""
    return np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)


def _value(pieces: Codes, bits: int, index: int) -> Codes:
    if bits == 8:
        return pieces[..., index]
    byte = pieces[..., index // 2]
    return byte >> np.uint8(4) if index % 2 else byte & np.uint8(0x0F)
