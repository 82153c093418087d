"""The host's part of a masked job, in the simulated machine's time: masks as late and as torn as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from backends.cpu_cases import ids
from backends.host_kernel import HostKernel
from monotape.backends.cuda.generation import MaskedCudaGeneration
from monotape.backends.cuda.masks import MaskTable, Verdict
from monotape.backends.protocol import Bits, Job, Sampling, Token
from monotape.backends.reference.sampler import choose, logprobs
from monotape.engine.constraint import packed, unpacked

Masks = Callable[[int], Bits | None]  # of token number n; None: the text is complete
SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.3, seed=5),
    "filtered": Sampling(temperature=1.1, top_k=7, top_p=0.9, seed=6),
    "adjusted": Sampling(
        temperature=0.8, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1,
        logit_bias=((4, 2.0), (17, -1.0), (4, 0.5)), seed=7,
    ),
}  # fmt: skip


def random_bits(vocab: int, seed: int, share: float = 0.3) -> Bits:
    """A mask with at least one bit."""
    random = np.random.default_rng(seed)
    allowed = random.random(vocab) < share
    allowed[random.integers(vocab)] = True
    return packed(allowed)


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
    ahead: int = 0  # masks that are given before it is known that the one before was used
    hints: Callable[[int], list[int]] | None = None  # tokens that the masks from that one on will force
    given: int = 0
    _since: int | None = field(default=None)

    def __call__(self, now: int) -> None:
        launch = self.generation._launch
        if self.given == self.most or launch.masks_over:
            return
        if self.given > self.ahead and launch.mailed(self.given - 1 - self.ahead) is None:
            return
        self._since = now if self._since is None else self._since
        if now < self._since + self.late:
            return
        self._since = None
        if self.given == self.cancel_at:
            return self.generation.cancel()
        if self.hints is not None:
            self.generation.expect(self.hints(self.given))
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
    end_after: int | None = None, complete: bool = False, ahead: int = 0, chunk: int | None = 0,
    hints: Callable[[int], list[int]] | None = None, too_far: bool = False,
) -> tuple[list[Token], MaskedCudaGeneration]:  # fmt: skip
    generation = MaskedCudaGeneration(backend, replace(job, masked=True), backend.new_sequence(), chunk=chunk)
    guide = Guide(generation, masks, late, cancel_at, most, end_after, complete, ahead, hints)
    assert too_far or ahead < generation.masks_ahead, "a mask over one that may be unread"
    table = backend.masks

    def visit(now: int) -> None:
        guide(now)
        if isinstance(table, TornTable):
            table.come()

    HostKernel.visit = visit
    return list(generation), generation


def check(backend: Any, job: Job, masks: Masks, tokens: Sequence[Token]) -> None:
    """What the reference chooses from the same logits under the same masks, with the same log-probabilities."""
    told = (*job.prompt, *ids(tokens)[:-1])
    logits = backend.logits(told, backend.new_sequence(), chunk=0)[len(job.prompt) - 1 :]
    for step, token in enumerate(tokens):
        bits = masks(step)
        assert bits is not None
        masked = np.where(unpacked(bits, logits.shape[1]), logits[step], np.float32(-np.inf))
        position = len(job.prompt) + step
        assert token.id == choose(masked, job.prompt, ids(tokens)[:step], position, job.sampling)
        if job.logprobs is not None:
            own, top = logprobs(logits[step], token.id, job.logprobs)
            assert token.logprob == pytest.approx(own, rel=1e-6)
            assert [best for best, _ in token.top_logprobs] == [best for best, _ in top]
