"""The table of masks that a kernel reads while it runs: which tokens may be drawn next (kernels/sampling/mask.h)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import PinnedMemory
from monotape.backends.protocol import MASK_BITS, Bits


def masks_for(rows_a_pass: int) -> int:
    """kernels/sampling/mask.h: kMasks"""
    return 8 if rows_a_pass > 1 else 3


class Verdict(IntEnum):
    """kernels/sampling/mask.h: Verdict"""

    GO_ON = 0
    COMPLETE = 1
    CANCELLED = 2


class MaskTable:
    """`masks` masks, used in turn, and a hint for each: the one token that it will allow.

    Upper halves of words: of a mask a verdict, then the bits of 32 ids each; of a hint the token. Lower halves: the
    number of the draw.
    """

    def __init__(self, vocab: int, masks: int) -> None:
        self.masks, self._count = masks, -(-vocab // MASK_BITS)
        self._memory = PinnedMemory(8 * masks * (1 + self._count + 1))
        self.pointer = self._memory.pointer

    @property
    def _words(self) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self._memory.view.view(np.uint64)
        return words

    def clear(self) -> None:
        """Before a launch: no word is about any draw of it."""
        self._words[:] = 0

    def words_of(self, number: int) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self._words[: -self.masks].reshape(self.masks, -1)[number % self.masks]
        return words

    def hint(self, number: int, token_id: int) -> None:
        """Says which token draw `number` will be allowed, before its mask does."""
        self._words[-self.masks :][number % self.masks] = token_id << 32 | number

    def write(self, number: int, verdict: Verdict, bits: Bits | None = None) -> None:
        """Says which tokens may be drawn in draw `number`: once, and all words of it."""
        assert bits is None or bits.shape == (self._count,), "a mask of another vocabulary"
        words = np.zeros(1 + self._count, np.uint64)
        words[0] = verdict
        if bits is not None:
            words[1:] = bits
        np.left_shift(words, np.uint64(32), out=words)
        # The kernel may look at any time. A plain copy may store single bytes; this operation stores whole words.
        np.bitwise_or(words, np.uint64(number), out=self.words_of(number))

    def close(self) -> None:
        self._memory.close()


class MaskWriter:
    """The masks of one request, in order: the first is that of its first token."""

    def __init__(self, table: MaskTable, first_number: int) -> None:
        self._table, self._number = table, first_number
        self.over = False
        table.clear()

    def write(self, verdict: Verdict, bits: Bits | None = None) -> None:
        """Of the next draw. After a last verdict nothing more."""
        if self.over:
            return
        self.over = verdict is not Verdict.GO_ON
        self._table.write(self._number, verdict, bits)
        self._number += 1

    def expect(self, ids: Sequence[int]) -> None:
        """Tokens that the next masks will allow, each alone: hints for as many as the table has room for."""
        ahead = list(enumerate(ids[: self._table.masks], self._number))
        for number, token_id in reversed(ahead):  # a hint is of use only with the one after it
            self._table.hint(number, token_id)
