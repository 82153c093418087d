"""Masks from the host while the kernel runs, on the host's machine: late, torn, cancelled, and never."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends import host_ranks
from backends.cpu_cases import ids
from backends.host_kernel import HostKernel, Schedule
from backends.host_masks import SAMPLINGS, Masks, TornTable, check, random_bits, run_masked
from backends.host_setups import VOCAB, Load, checkpoints, loading_from, on_machines
from backends.source_edits import Line, put
from monotape.backends.protocol import Job
from monotape.engine.constraint import unpacked
from monotape.errors import DeadlineFault

pytestmark = pytest.mark.slow

SCHEDULES = (
    Schedule(seed=1),
    Schedule(seed=2, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
    Schedule(seed=3, stalls_per_million=40, stall_steps=100_000, delay_steps=3000),
)
PROMPT = tuple(np.random.default_rng(7).integers(3, VOCAB, 9).tolist())
LATE = 500_000  # steps; a token takes a fifth of them


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path, request: pytest.FixtureRequest) -> Iterator[Load]:
    with loading_from(place, request.param) as load:
        yield load


def some_masks(vocab: int) -> Masks:
    return lambda number: random_bits(vocab, number)


@on_machines(
    "setup, sampling, late",
    [
        ("two workers", "greedy", 0),
        ("two workers", "drawn", 0),
        ("odd heads", "filtered", LATE),
        ("many workers", "adjusted", LATE),  # some of them have no part of the vocabulary
        ("many words", "greedy", 0),
    ],
    hip=(1, 2),
)
def test_masks_come_in_time_or_late(load: Load, setup: str, sampling: str, late: int) -> None:
    backend = load(setup)
    job = Job(PROMPT, 0, 5, sampling=SAMPLINGS[sampling], logprobs=3 if late else None)
    masks = some_masks(backend.spec.vocab)
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        before = backend.kernel.launches
        tokens, generation = run_masked(backend, job, masks, late=late)
        assert backend.kernel.launches == before + 1
        assert generation.finish_reason == "length" and len(tokens) == 5
        seen.append(ids(tokens))
    assert seen[0] == seen[1] == seen[2]
    check(backend, job, masks, tokens)


@on_machines(hip=())
def test_more_words_of_a_mask_than_threads(load: Load) -> None:
    backend = load("many masks")
    assert backend.spec.vocab > 2 * 32 * 256, "one look suffices"
    # One token is allowed, and any that is not barred would most likely be better.
    masks: Masks = lambda number: random_bits(backend.spec.vocab, number, share=0)  # noqa: E731
    job = Job(PROMPT[:2], 0, 3)
    tokens, _ = run_masked(backend, job, masks)
    check(backend, job, masks, tokens)


@on_machines()
def test_after_rows_of_a_prompt_too(load: Load) -> None:
    backend = load("two workers")
    masks, job = some_masks(VOCAB), Job(PROMPT, 0, 4)
    tokens, _ = run_masked(backend, job, masks, chunk=None)
    assert all(unpacked(random_bits(VOCAB, step), VOCAB)[token.id] for step, token in enumerate(tokens))
    assert len(tokens) == 4


@on_machines()
def test_words_of_a_mask_come_one_by_one_in_any_order(load: Load) -> None:
    """A word is valid by itself: those of the token before are not taken for new ones."""
    backend = load("many words")
    backend.masks = TornTable(backend.spec.vocab, backend.masks.masks)
    backend.masks.waiting = []
    masks, job = some_masks(backend.spec.vocab), Job(PROMPT, 0, 4, sampling=SAMPLINGS["drawn"])
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        tokens, _ = run_masked(backend, job, masks)
        check(backend, job, masks, tokens)


@on_machines(hip=())
def test_without_the_numbers_an_old_word_is_taken(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checked = "if (static_cast<uint32_t>(word) == number) return"
    put(Line("sampling/team.h", checked, checked.replace("== number", "!= 0")), tmp_path, monkeypatch)
    backend = load("two workers")
    masks = some_masks(VOCAB)
    tokens, _ = run_masked(backend, Job(PROMPT, 0, 6), masks, late=LATE)
    with pytest.raises(AssertionError):
        check(backend, Job(PROMPT, 0, 6), masks, tokens)


@on_machines("sampling", ["greedy", "filtered"])
@pytest.mark.parametrize("length", [0, 3])
def test_a_complete_text_ends_without_a_token(load: Load, sampling: str, length: int) -> None:
    backend = load("odd heads")
    masks: Masks = lambda number: random_bits(VOCAB, number) if number < length else None  # noqa: E731
    job = Job(PROMPT, 0, 9, sampling=SAMPLINGS[sampling])
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        tokens, generation = run_masked(backend, job, masks, late=LATE)
        assert generation.finish_reason == "stop" and len(tokens) == length
    if tokens:
        check(backend, job, masks, tokens)


@on_machines()
def test_a_stop_id_ends_it_and_the_next_request_is_free(load: Load) -> None:
    backend = load("two workers")
    stop = random_bits(VOCAB, 0, share=0)
    (only,) = np.flatnonzero(unpacked(stop, VOCAB)).tolist()
    job = Job(PROMPT, 0, 9, stop_ids=(only,))
    tokens, generation = run_masked(backend, job, lambda n: stop if n == 2 else random_bits(VOCAB, n + 50))
    assert generation.finish_reason == "stop" and tokens[-1].id == only
    free = list(backend.start(Job(PROMPT, 0, 3), backend.new_sequence()))
    assert len(free) == 3


@on_machines("at", [0, 2])
def test_cancelled_while_it_waits(load: Load, at: int) -> None:
    backend = load("odd heads")
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        tokens, generation = run_masked(
            backend, Job(PROMPT, 0, 9), some_masks(VOCAB), late=LATE, cancel_at=at
        )
        assert generation.finish_reason == "cancelled" and len(tokens) == at
    tokens, generation = run_masked(backend, Job(PROMPT, 0, 3), some_masks(VOCAB))
    assert generation.finish_reason == "length"


@on_machines("complete, ahead", [(False, 0), (True, 1), (False, 1)])
def test_an_end_that_comes_before_the_last_masks_are_read(load: Load, complete: bool, ahead: int) -> None:
    """It must not lie over those masks: the kernel would wait for them until its deadline."""
    backend, masks, job = load("two workers"), some_masks(VOCAB), Job(PROMPT, 0, 9)
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        tokens, generation = run_masked(backend, job, masks, end_after=3, complete=complete, ahead=ahead)
        assert generation.finish_reason == ("stop" if complete else "cancelled") and len(tokens) == 3
    check(backend, job, masks, tokens)


@on_machines("cancel_at", [50, 20_000, 60_000, 150_000])
def test_cancelled_at_any_time(load: Load, cancel_at: int) -> None:
    """By the host's flag alone, as a cancellation that comes when masks are already there."""
    backend = load("two workers")
    HostKernel.schedule = Schedule(seed=4, cancel_at=cancel_at)
    tokens, generation = run_masked(backend, Job(PROMPT, 0, 90), some_masks(VOCAB))
    assert generation.finish_reason == "cancelled" and len(tokens) < 90


@on_machines("given", [0, 2])
def test_a_mask_that_never_comes_is_named(load: Load, given: int) -> None:
    backend = load("two workers")
    backend._params.deadline_ns = 1_000_000
    with pytest.raises(DeadlineFault, match="The host gave no mask for the choice of a token, at position"):
        run_masked(backend, Job(PROMPT, 0, 9), some_masks(VOCAB), most=given)


@on_machines(hip=())
def test_the_host_has_longer_than_workers(load: Load) -> None:
    backend = load("two workers")
    backend._params.deadline_ns = 1_000_000
    tokens, _ = run_masked(backend, Job(PROMPT, 0, 3), some_masks(VOCAB), late=20_000_000)
    check(backend, Job(PROMPT, 0, 3), some_masks(VOCAB), tokens)


@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_all_ranks_read_the_same_masks(tmp_path_factory: pytest.TempPathFactory, sampling: str) -> None:
    with host_ranks.loader(host_ranks.checkpoints(tmp_path_factory)) as load:
        backend = load("llama", 2, 2)
        job = Job(PROMPT, 0, 4, sampling=SAMPLINGS[sampling])
        masks = some_masks(host_ranks.VOCAB)
        for schedule in SCHEDULES:
            HostKernel.schedule = schedule
            tokens, generation = run_masked(backend, job, masks, late=LATE)
            assert generation.finish_reason == "length"
            check(backend, job, masks, tokens)
        tokens, generation = run_masked(backend, job, masks, late=LATE, cancel_at=2)
        assert generation.finish_reason == "cancelled" and len(tokens) == 2
        tokens, generation = run_masked(backend, job, lambda n: None if n == 3 else masks(n))
        assert generation.finish_reason == "stop" and len(tokens) == 3
