"""The table of masks that a kernel reads while it runs: which tokens may be drawn next (kernels/sampling/mask.h)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from monotape.backends.cuda.driver import PinnedMemory
from monotape.backends.protocol import MASK_BITS, Bits


class Verdict(IntEnum):
    """kernels/sampling/mask.h: Verdict"""

    GO_ON = 0
    COMPLETE = 1
    CANCELLED = 2


class MaskTable:
    """Upper halves of words: a verdict, then the bits of 32 ids each. Lower halves: numbers of draws."""

    def __init__(self, vocab: int) -> None:
        self._count = -(-vocab // MASK_BITS)
        self._memory = PinnedMemory(8 * (1 + self._count))
        self.pointer = self._memory.pointer

    def clear(self) -> None:
        """Before a launch: no word is about any draw of it."""
        self._memory.view.view(np.uint64)[:] = 0

    def write(self, number: int, verdict: Verdict, bits: Bits | None = None) -> None:
        """Says which tokens may be drawn in draw `number`; once for each, and all words of it."""
        assert bits is None or bits.shape == (self._count,), "a mask of another vocabulary"
        words = np.zeros(1 + self._count, np.uint64)
        words[0] = verdict
        if bits is not None:
            words[1:] = bits
        np.left_shift(words, np.uint64(32), out=words)
        # The kernel may look at any time. A plain copy may store single bytes; this operation stores whole words.
        np.bitwise_or(words, np.uint64(number), out=self._memory.view.view(np.uint64))

    def close(self) -> None:
        self._memory.close()


class MaskWriter:
    """The masks of one request, in order: the first is that of its first token."""

    def __init__(self, table: MaskTable, first_number: int) -> None:
        self._table, self._number = table, first_number
        self.over = False
        table.clear()

    def write(self, verdict: Verdict, bits: Bits | None = None) -> None:
        """Nothing after a last verdict: a word of a number is written once."""
        if self.over:
            return
        self.over = verdict is not Verdict.GO_ON
        self._table.write(self._number, verdict, bits)
        self._number += 1
