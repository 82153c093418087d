"""What may come next in a text, asked between two tokens, and the masks in which the answers are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import MASK_BITS, Bits

Mask = NDArray[np.bool_]  # one for each id of the model's table


class Constraint(Protocol):
    """What the answer must look like. It gets every token, and is asked for a mask between two tokens."""

    def forced(self) -> list[int]:
        """The tokens that can only come next, if there are such; quick."""
        ...

    def allowed(self) -> Bits:
        """The tokens that may come next; none when the text is complete and nothing may follow."""
        ...

    def accept(self, token_id: int) -> None: ...

    def cancel(self) -> None:
        """Makes an answer that is being worked out fail at once; from any thread."""
        ...


def packed(mask: Mask) -> Bits:
    return from_bytes(np.packbits(mask, bitorder="little").tobytes(), len(mask))


def unpacked(bits: Bits, vocab: int) -> Mask:
    return np.unpackbits(bits.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)


def from_bytes(data: bytes, vocab: int) -> Bits:
    """Bits of the first ids, the lowest bit of a byte first; of further ids zeros."""
    room = np.zeros(-(-vocab // MASK_BITS) * MASK_BITS // 8, np.uint8)
    given = np.frombuffer(data, np.uint8)[: len(room)]
    room[: len(given)] = given
    bits: Bits = room.view(np.dtype("<u4"))
    if vocab % MASK_BITS:
        bits[-1] &= (1 << vocab % MASK_BITS) - 1
    return bits


def only(token_id: int, vocab: int) -> Bits:
    bits = np.zeros(-(-vocab // MASK_BITS), np.uint32)
    bits[token_id // MASK_BITS] = 1 << token_id % MASK_BITS
    return bits


def without(bits: Bits, token_ids: Sequence[int]) -> Bits:
    left = bits.copy()
    for token_id in token_ids:
        left[token_id // MASK_BITS] &= ~np.uint32(1 << token_id % MASK_BITS)
    return left
