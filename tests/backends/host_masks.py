"""The host's part of a masked job, in the simulated machine's time: masks as late and as torn as a test wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from backends.host_kernel import HostKernel
from monotape.backends.cuda.generation import MaskedCudaGeneration
from monotape.backends.cuda.masks import MaskTable, Verdict
from monotape.backends.protocol import Bits, Job, Token

Masks = Callable[[int], Bits | None]  # of token number n; None: the text is complete


def random_bits(vocab: int, seed: int, share: float = 0.3) -> Bits:
    """A mask with at least one bit."""
    random = np.random.default_rng(seed)
    allowed = random.random(vocab) < share
    allowed[random.integers(vocab)] = True
    return bits_of(allowed)


def bits_of(allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> Bits:
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def allowed_by(bits: Bits, vocab: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.unpackbits(bits.view(np.uint8), count=vocab, bitorder="little").astype(np.bool_)


@dataclass
class Guide:
    """Visited by the machine now and then; a mask comes `late` steps after the token before it."""

    generation: MaskedCudaGeneration
    masks: Masks
    late: int = 0
    cancel_at: int | None = None  # of the masks: instead of that one comes a cancellation
    most: int | None = None  # masks that are given; no more come
    end_after: int | None = None  # masks, the last of which the end follows at once
    complete: bool = False  # whether that is the end of the text, or a cancellation
    given: int = 0
    _since: int | None = field(default=None)

    def __call__(self, now: int) -> None:
        launch = self.generation._launch
        if self.given == self.most or launch.masks_over:
            return
        if self.given and launch.mailed(self.given - 1) is None:
            return
        self._since = now if self._since is None else self._since
        if now < self._since + self.late:
            return
        self._since = None
        if self.given == self.cancel_at:
            return self.generation.cancel()
        bits = self.masks(self.given)
        self.given += 1
        if bits is None:
            return self.generation.end_masks(complete=True)
        self.generation.allow(bits)
        if self.given == self.end_after:  # the kernel may not have looked at this mask yet
            self.generation.end_masks(complete=self.complete)


class TornTable(MaskTable):
    """Its words come one by one in any order, some at each visit, the verdict among them."""

    waiting: list[tuple[Any, int, int]]

    def write(self, number: int, verdict: Verdict, bits: Bits | None = None) -> None:
        table = self.words_of(number)
        before = table.copy()
        super().write(number, verdict, bits)
        after = table.copy()
        table[:] = before
        order = np.random.default_rng(number).permutation(len(after))
        self.waiting = [(table, int(index), int(after[index])) for index in order]

    def come(self, _: int = 0) -> None:
        for table, index, word in self.waiting[:2]:
            table[index] = word
        del self.waiting[:2]


def run_masked(
    backend: Any, job: Job, masks: Masks, *, late: int = 0, cancel_at: int | None = None, most: int | None = None,
    end_after: int | None = None, complete: bool = False, chunk: int | None = 0,
) -> tuple[list[Token], MaskedCudaGeneration]:  # fmt: skip
    generation = MaskedCudaGeneration(backend, replace(job, masked=True), backend.new_sequence(), chunk=chunk)
    guide = Guide(generation, masks, late, cancel_at, most, end_after, complete)
    table = getattr(backend, "ranks", [backend])[0].masks

    def visit(now: int) -> None:
        guide(now)
        if isinstance(table, TornTable):
            table.come()

    HostKernel.visit = visit
    return list(generation), generation
