"""Tokens that a grammar forces are drafts: the host's hints let a pass compute several, and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import ids
from backends.host_kernel import HostKernel, MachineFault, Schedule
from backends.host_masks import SAMPLINGS, Masks, TornTable, check, random_bits, run_masked
from backends.host_setups import VOCAB, Load, checkpoints, loading_from
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.masks import MaskTable, MaskWriter, Verdict, masks_for
from monotape.backends.protocol import Job
from monotape.engine.constraint import only, unpacked

pytestmark = pytest.mark.slow

SCHEDULES = (
    Schedule(1),
    Schedule(2, stalls_per_million=500, stall_steps=50_000, delay_steps=2000),
    Schedule(3, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
)
PROMPT = tuple(np.random.default_rng(7).integers(3, VOCAB, 9).tolist())
FREE = {5, 6, 17}  # numbers of tokens that are chosen; all others are forced, at most ten in a row
AHEAD = masks_for(4) - 2
TOKENS = 24
LATE = 500_000  # steps; a token takes a fifth of them


_OTHERS = [
    token
    for token in np.random.default_rng(3).permutation(np.arange(3, VOCAB)).tolist()
    if token not in PROMPT
]


def forced_token(number: int) -> int:
    """No token comes twice, so that a lookup finds nothing."""
    return _OTHERS[number]


def masks(number: int) -> np.ndarray:
    return random_bits(VOCAB, number) if number in FREE else only(forced_token(number), VOCAB)


def run_from(number: int) -> list[int]:
    """Tokens that are forced from this one on."""
    end = next((free for free in sorted(FREE) if free >= number), TOKENS)
    return [forced_token(later) for later in range(number, end)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def backend(place: Path) -> Iterator[CudaBackend]:
    with loading_from(place) as load:
        yield of_rows(load)


def of_rows(load: Load) -> CudaBackend:
    return load("two workers", rows=4)


@pytest.mark.parametrize(("sampling", "late"), [("greedy", 0), ("drawn", LATE), ("adjusted", 0)])
def test_forced_tokens_share_a_pass_and_change_nothing(
    backend: CudaBackend, sampling: str, late: int
) -> None:
    job = Job(PROMPT, 0, TOKENS, sampling=SAMPLINGS[sampling])
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        tokens, generation = run_masked(backend, job, masks, late=late, ahead=AHEAD, hints=run_from)
        assert len(tokens) == TOKENS and generation.finish_reason == "length"
        check(backend, job, masks, tokens)
        assert generation.accepted >= (0 if late else 12), "late ones may come when their pass is over"


def test_after_rows_of_a_prompt_the_first_tokens_are_hinted_too(backend: CudaBackend) -> None:
    job = Job(PROMPT, 0, 4)
    tokens, generation = run_masked(backend, job, masks, ahead=AHEAD, hints=run_from, chunk=None)
    assert ids(tokens) == run_from(0)[:4] and generation.accepted > 0


def test_without_hints_nothing_is_drafted(backend: CudaBackend) -> None:
    """Of a text that repeats nothing."""
    tokens, generation = run_masked(backend, Job(PROMPT, 0, 20), masks, ahead=AHEAD)
    assert generation.drafted == 0
    assert [token for number, token in enumerate(ids(tokens)) if number not in FREE] == [
        forced_token(number) for number in range(20) if number not in FREE
    ]


def test_hints_are_ignored_without_drafts(backend: CudaBackend) -> None:
    _, generation = run_masked(backend, Job(PROMPT, 0, 9, drafts=False), masks, ahead=AHEAD, hints=run_from)
    assert generation.drafted == 0


@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_wrong_hints_are_rejected(backend: CudaBackend, sampling: str) -> None:
    job = Job(PROMPT, 0, 20, sampling=SAMPLINGS[sampling])
    tokens, generation = run_masked(
        backend, job, masks, ahead=AHEAD,
        hints=lambda number: [token if at % 3 else 2 for at, token in enumerate(run_from(number), number)],
    )  # fmt: skip
    assert generation.drafted > generation.accepted
    check(backend, job, masks, tokens)


def test_words_come_one_by_one_in_any_order(backend: CudaBackend) -> None:
    backend.masks = TornTable(backend.spec.vocab, backend.masks.masks)
    backend.masks.waiting = []
    job = Job(PROMPT, 0, 12)
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        tokens, generation = run_masked(backend, job, masks, hints=run_from)
        assert generation.accepted > 0
        check(backend, job, masks, tokens)


@pytest.mark.parametrize("last", [2, 3, 9])
def test_a_forced_stop_id_ends_the_text(backend: CudaBackend, last: int) -> None:
    job = Job(PROMPT, 0, TOKENS, stop_ids=(forced_token(last),))
    tokens, generation = run_masked(backend, job, masks, ahead=AHEAD, hints=run_from)
    assert generation.finish_reason == "stop" and len(tokens) == last + 1


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_last_token_may_be_any_of_a_pass(backend: CudaBackend, length: int) -> None:
    tokens, generation = run_masked(backend, Job(PROMPT, 0, length), masks, ahead=AHEAD, hints=run_from)
    assert generation.finish_reason == "length" and ids(tokens) == run_from(0)[:length]


@pytest.mark.parametrize("complete", [False, True])
def test_an_end_that_comes_before_the_last_masks_are_read(backend: CudaBackend, complete: bool) -> None:
    """It must not lie over those masks: the kernel would wait for them until its deadline."""
    job = Job(PROMPT, 0, TOKENS)
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        tokens, generation = run_masked(
            backend, job, masks, end_after=9, complete=complete, ahead=AHEAD, hints=run_from
        )
        assert generation.finish_reason == ("stop" if complete else "cancelled") and len(tokens) == 9
    check(backend, job, masks, tokens)


def test_a_mask_that_comes_too_early_lies_over_one_that_is_unread(backend: CudaBackend) -> None:
    """The rule of sampling/mask.h is as strict as it must be: its last place is for an end, one further is unread."""
    schedule = Schedule(
        1, stalls_per_million=500, stall_steps=50_000, delay_steps=2000, most_steps=12_000_000
    )
    HostKernel.schedule = schedule
    job = Job(PROMPT, 0, TOKENS)
    tokens, _ = run_masked(backend, job, masks, ahead=AHEAD + 1, hints=run_from, too_far=True)
    assert HostKernel.steps < schedule.most_steps / 2
    check(backend, job, masks, tokens)
    HostKernel.schedule = schedule
    with pytest.raises(MachineFault, match="too long"):
        run_masked(backend, job, masks, ahead=AHEAD + 2, hints=run_from, too_far=True)


class Words(MaskTable):
    """A table in plain memory."""

    def __init__(self, vocab: int, masks: int) -> None:
        self.masks, self._count = masks, -(-vocab // 32)
        self._plain = np.zeros(masks * (2 + self._count), np.uint64)

    @property
    def _words(self) -> np.ndarray:
        return self._plain

    def hints(self) -> list[tuple[int, int]]:
        """Number and token, of all that there are."""
        return [(int(word) & 0xFFFFFFFF, int(word) >> 32) for word in self._plain[-self.masks :] if word]


def test_hints_run_ahead_of_masks_as_far_as_there_are_any() -> None:
    table = Words(200, 8)
    writer = MaskWriter(table, 40)
    writer.expect(list(range(100, 120)))
    assert sorted(table.hints()) == [(40 + index, 100 + index) for index in range(8)]
    writer.write(Verdict.GO_ON, only(100, 200))
    writer.expect(list(range(101, 120)))
    assert sorted(table.hints()) == [(41 + index, 101 + index) for index in range(8)]
    allowed: Masks = lambda number: table.words_of(number)[1:] >> np.uint64(32)  # noqa: E731
    assert np.flatnonzero(unpacked(allowed(40).astype(np.uint32), 200)).tolist() == [100]
    writer.write(Verdict.GO_ON, random_bits(200, 1))  # not what was expected
    writer.expect([7, 8])
    assert {(42, 7), (43, 8)} <= set(table.hints())
