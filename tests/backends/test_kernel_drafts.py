"""Several rows a pass: drafts that are accepted wholly, partly or not at all change no token and no log-probability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.host_drafts import SAMPLINGS, Answer, answer, choices_of, plain, predicting
from backends.host_kernel import HostKernel, Schedule
from backends.host_masks import SAMPLINGS as MASKED_SAMPLINGS
from backends.host_masks import Masks, random_bits, run_masked
from backends.host_setups import CONTEXT, VOCAB, Load, checkpoints, loading_from
from backends.source_edits import Line, put
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.protocol import Job, Sampling
from monotape.engine.constraint import packed
from monotape.plan.formats import TILE_ROWS
from monotape.plan.gpu import BLOCK_K, UNIT_POSITIONS
from monotape.plan.gpu_machines import WARPS

pytestmark = pytest.mark.slow

SCHEDULES = (
    Schedule(1),
    Schedule(2, stalls_per_million=500, stall_steps=50_000, delay_steps=2000),
    Schedule(3, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
)
PAGE_BLOCKS = {"long tiles": 16, "direct": 16}  # a tile of `down` takes several pages
TEXT = tuple(np.random.default_rng(11).integers(3, VOCAB, CONTEXT).tolist())
SHORT = TEXT[:8]
NEAR = TEXT[:22]  # ten tokens on, a unit of KV ends
RIGHT, WRONG = 0.0, (0.15, 0.4)  # shares of a predicted text that are other tokens
LATE = 500_000  # steps; a token takes a fifth of them
long, wide = pytest.mark.long, pytest.mark.wide


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path) -> Iterator[Load]:
    with loading_from(place) as load:
        yield load


def loaded(load: Load, setup: str, rows: int) -> CudaBackend:
    return load(setup, PAGE_BLOCKS.get(setup), rows)


def one_by_one(backend: CudaBackend, job: Job) -> Answer:
    HostKernel.schedule = Schedule(1)
    whole = answer(backend, plain(job))
    assert whole.drafted == whole.accepted == 0
    return whole


def check_drafts(backend: CudaBackend, job: Job, schedules: tuple[Schedule, ...] = SCHEDULES[:1]) -> Answer:
    """With predictions that are right, mostly right and mostly wrong; returns the answer without any."""
    expected = one_by_one(backend, job)
    accepted, rejected = dict.fromkeys((RIGHT, *WRONG), 0), 0
    for wrong in accepted:
        predicted = predicting(job, expected.ids, wrong, VOCAB)
        for schedule in schedules:
            HostKernel.schedule = schedule
            got = answer(backend, predicted)
            assert got.told == expected.told, f"{wrong} of the prediction are wrong, {schedule}"
            accepted[wrong] += got.accepted
            rejected += got.drafted - got.accepted
    # Where the first drafts are wrong, no more of that prediction may be checked.
    assert rejected > 0 and accepted[RIGHT] > 0 and sum(accepted[wrong] for wrong in WRONG) > 0
    return expected


@long
def test_lanes_that_read_different_times_decide_alike(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lanes of the drafter's warp may be apart when they look at the clock, and shuffle after they have decided."""
    late = Line("worker/drafter.h", "clock_ns()", "(clock_ns() + seen_ % 3 * 40000 * lane_number())")
    decides = Line("worker/drafter.h", "  __device__ bool worth_it() {\n")
    for line in (
        late,
        replace(decides, instead=f"{decides.line}    while (credit_ != lane_at(credit_, 0)) rest(1000);\n"),
    ):
        put(line, tmp_path, monkeypatch)
    check_drafts(loaded(load, "two workers", 4), Job(SHORT, 0, 30), (Schedule(1, most_steps=20_000_000),))


@pytest.mark.parametrize(
    ("setup", "rows", "sampling", "schedules", "tokens"),
    [
        ("two workers", 4, "greedy", 3, 45),
        ("two workers", 4, "penalties", 1, 30),
        ("two workers", 4, "biases", 1, 30),
        ("odd heads", 3, "filtered", 1, 20),
        *(
            pytest.param(setup, rows, sampling, 2, 20, marks=mark)
            for setup, rows, sampling, mark in (
                ("two workers", 3, "greedy", wide),
                ("odd heads", 4, "greedy", wide),
                ("splits", 4, "filtered", long),
                ("two left out", 4, "drawn", long),
                ("long tiles", 3, "drawn", wide),
                ("direct", 4, "greedy", wide),
                ("odd direct", 4, "greedy", long),
                ("fewer workers than heads", 4, "filtered", long),
                ("many splits", 4, "drawn", long),
                ("two batches", 4, "greedy", wide),
            )
        ),
        pytest.param("many workers", 2, "penalties", 1, 14, marks=wide),
    ],
)
def test_drafts_change_no_token(
    load: Load, setup: str, rows: int, sampling: str, schedules: int, tokens: int
) -> None:
    job = Job(SHORT if tokens > 24 else NEAR, 0, tokens, **SAMPLINGS[sampling])
    assert len(job.prompt) + tokens > UNIT_POSITIONS
    expected = check_drafts(loaded(load, setup, rows), job, SCHEDULES[:schedules])
    assert len(expected.choices) > (20 if job.stop_ids else tokens - 1)


def test_inputs_that_stay_in_the_exchange(load: Load) -> None:
    """Those of `down`: more blocks than eight of a warp. The others are in shared memory, for every row."""
    backend = loaded(load, "direct", 4)
    blocks = [-(-stage.k // BLOCK_K) for stage in backend.gpu_rank.matrices]
    assert max(blocks) > 8 * WARPS and sorted(blocks)[-2] <= 8 * WARPS
    check_drafts(backend, Job(SHORT, 0, 16))


@pytest.mark.parametrize(
    ("setup", "rows"),
    [
        ("two workers", 4),
        *(pytest.param(setup, 4, marks=long) for setup in ("splits", "two left out", "direct")),
    ],
)
def test_a_kernel_of_several_rows_gives_the_tokens_of_a_kernel_of_one(
    load: Load, setup: str, rows: int
) -> None:
    """So what the other tests compare with is what there was before."""
    several, single = loaded(load, setup, rows), loaded(load, setup, 1)
    for sampling in ("greedy", "filtered"):
        job = Job(SHORT, 0, 12, **SAMPLINGS[sampling])
        assert one_by_one(several, job).told == one_by_one(single, job).told


def test_a_text_that_repeats_itself_is_drafted_without_a_prediction(load: Load) -> None:
    backend = load("two workers", rows=4)
    pattern = Job(TEXT[:6] * 5, 0, 30)
    expected = one_by_one(backend, pattern)
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        got = answer(backend, pattern)
        assert got.told == expected.told
        assert got.accepted > 0


def test_no_prediction_is_no_error(load: Load) -> None:
    """Two tokens that have never been there before: there is nothing to look up."""
    backend = load("two workers", rows=4)
    job = Job((7, 9), 0, 3)
    assert answer(backend, job).told == one_by_one(backend, job).told


# Ends


def test_a_stop_id_among_accepted_drafts_is_the_last_token(load: Load) -> None:
    backend = load("two workers", rows=4)
    job = Job(SHORT, 0, 40, **SAMPLINGS["drawn"])
    whole = one_by_one(backend, job)
    seen = [index for index, token in enumerate(whole.ids) if index > 5 and token not in whole.ids[:index]]
    for index in seen[:8]:  # on every row of a pass
        stopping = replace(job, stop_ids=(58, whole.ids[index]) if whole.ids[index] != 58 else (58,))
        got_sequence = backend.new_sequence()
        got = answer(backend, predicting(stopping, whole.ids, RIGHT, VOCAB), got_sequence)
        assert got.choices == whole.choices[: index + 1] and got.finish_reason == "stop"
        assert got.accepted > 0
        assert got_sequence.length == len(job.prompt) + index


@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_no_pass_gives_more_tokens_than_were_asked_for(load: Load, sampling: str) -> None:
    backend = load("two workers", rows=4)
    whole = one_by_one(backend, Job(SHORT, 0, 16, **SAMPLINGS[sampling]))
    for count in range(12, 16):
        job = Job(SHORT, 0, count, **SAMPLINGS[sampling])
        got = answer(backend, predicting(job, whole.ids, RIGHT, VOCAB))
        assert got.choices == whole.choices[:count] and got.finish_reason == "length"
        assert got.accepted > 0


@pytest.mark.parametrize("context", [CONTEXT, pytest.param(CONTEXT - 11, marks=long)])
def test_to_the_last_position_of_the_context(load: Load, context: int) -> None:
    backend = load("two workers", rows=4, context=context)
    for length in (context - 17, context - 16, context - 14):
        job = Job(TEXT[:length], 0, context - length)
        expected = one_by_one(backend, job)
        HostKernel.schedule = SCHEDULES[1]
        sequence = backend.new_sequence()
        got = answer(backend, predicting(job, expected.ids, RIGHT, VOCAB), sequence)
        assert got.told == expected.told and got.accepted > 0
        assert expected.finish_reason == "length" and sequence.length == context - 1


@pytest.mark.parametrize(
    ("setup", "rows", "end", "starts"),  # the end of the unit
    [
        ("two workers", 4, 32, 5),
        pytest.param("splits", 4, 32, 5, marks=long),  # where a second split begins
        pytest.param("many splits", 4, 128, 2, marks=long),
    ],
)
def test_rows_stay_in_one_unit(load: Load, setup: str, rows: int, end: int, starts: int) -> None:
    backend = load(setup, rows=rows)
    for length in range(end - 9, end - 9 + starts):
        job = Job(TEXT[:length], 0, 14, logprobs=1)
        expected = one_by_one(backend, job)
        HostKernel.schedule = SCHEDULES[length % 2]
        got = answer(backend, predicting(job, expected.ids, RIGHT, VOCAB))
        assert got.told == expected.told and got.accepted > 0


@pytest.mark.parametrize(
    ("setup", "edge", "starts"),  # the edge: the first token that does not see the oldest unit
    [
        ("window", 101, 2),
        *(pytest.param(*case, 4, marks=long) for case in (("window", 133), ("window in splits", 101))),
    ],
)
def test_rows_that_see_other_units_are_in_other_passes(
    load: Load, setup: str, edge: int, starts: int
) -> None:
    backend = load(setup, rows=4)
    assert backend.spec.windows == (70, 70) and (edge + 1 - 70) % 32 == 0
    for length in range(edge - 8, edge - 8 + starts):
        job = Job(TEXT[:length], 0, 12, logprobs=1)
        expected = one_by_one(backend, job)
        HostKernel.schedule = SCHEDULES[length % 2]
        got = answer(backend, predicting(job, expected.ids, RIGHT, VOCAB))
        assert got.told == expected.told and got.accepted > 0


@pytest.mark.parametrize(
    ("setup", "pages", "length"),
    [
        pytest.param(
            "two workers", 16, 118, marks=long
        ),  # from position 128 on there are five units for eight warps
        pytest.param("two workers", 16, 250, marks=long),  # from position 256 on some warps have two
        pytest.param("large head", 96, 282, marks=long),  # from position 288 on they do not fit the ring
    ],
)
def test_many_units_of_one_worker(load: Load, setup: str, pages: int, length: int) -> None:
    backend = load(setup, pages, rows=4, context=352, units=16)
    if setup == "large head":
        ring, unit = backend.gpu_rank.pages, backend.gpu_rank.kv.unit_bytes
        assert (ring.ring - 1) * (pages * 2 * BLOCK_K * TILE_ROWS // unit) == 288 // UNIT_POSITIONS
    for start in (length, length + 3):
        job = Job((TEXT * 2)[:start], 0, 24, logprobs=1)
        check_drafts(backend, job, SCHEDULES[:2])


# KV


@pytest.mark.parametrize("setup", ["two workers", pytest.param("many splits", marks=long)])
def test_rejected_rows_leave_nothing_in_the_kv(load: Load, setup: str) -> None:
    """What is told after them, and its log-probabilities and logits, have the bits of a turn after plain tokens."""
    backend, job = load(setup, rows=4), Job(SHORT, 0, 30)
    expected = one_by_one(backend, job)
    more = (*job.prompt, *expected.ids, *TEXT[40:43])

    def second_turn(first: Job, drafts: bool) -> tuple[Any, Any]:
        HostKernel.schedule = SCHEDULES[1]
        sequence, copied = backend.new_sequence(), backend.new_sequence()
        told = answer(backend, first, sequence)
        assert told.ids == expected.ids and sequence.length == len(job.prompt) + 29
        assert not first.drafts or told.accepted < told.drafted
        copied.copy_from(sequence, sequence.length)
        logits = backend.logits(more[copied.length :], copied, chunk=0)
        turn = Job(more, sequence.length, 8, logprobs=4, drafts=drafts)
        return answer(backend, turn, sequence).told, logits.tolist()

    right = second_turn(plain(job), False)
    for wrong in WRONG:
        assert second_turn(predicting(job, expected.ids, wrong, VOCAB), True) == right


# Masks and the end of a request


def some_masks(number: int) -> np.ndarray:
    return random_bits(VOCAB, number, share=0.5)


@pytest.mark.parametrize(
    ("sampling", "late"),
    [
        ("greedy", 0),
        ("filtered", LATE),
        pytest.param("greedy", LATE, marks=long),
        pytest.param("drawn", 0, marks=long),
        pytest.param("adjusted", LATE, marks=long),
    ],
)
def test_masks_for_every_row(load: Load, sampling: str, late: int) -> None:
    backend = load("two workers", rows=4)
    job = Job(SHORT, 0, 15, sampling=MASKED_SAMPLINGS[sampling], logprobs=3)
    HostKernel.schedule = SCHEDULES[0]
    expected, _ = run_masked(backend, plain(job), some_masks)
    ids = [token.id for token in expected]
    for wrong, schedule in zip((RIGHT, WRONG[0], WRONG[1]), SCHEDULES, strict=True):
        HostKernel.schedule = schedule
        tokens, generation = run_masked(backend, predicting(job, ids, wrong, VOCAB), some_masks, late=late)
        assert choices_of(tokens) == choices_of(expected) and generation.finish_reason == "length"
        assert 0 < generation._launch.accepted <= generation._launch.drafted


def test_a_mask_that_allows_one_token_makes_a_draft_right_or_wrong(load: Load) -> None:
    """What the model itself would say next is barred: the draft is accepted only where the mask forces it."""
    backend = load("two workers", rows=4)
    forced = TEXT[50:70]
    masks: Masks = lambda number: packed(np.arange(VOCAB) == forced[number % 20])  # noqa: E731
    job = replace(
        Job(SHORT, 0, len(forced)), prediction=(*SHORT[-2:], *forced[:9], *TEXT[90:96], *forced[15:])
    )
    tokens, generation = run_masked(backend, job, masks)
    assert tuple(token.id for token in tokens) == forced
    assert generation._launch.accepted > 0


def test_a_text_that_is_complete_in_the_middle_of_a_pass(load: Load) -> None:
    backend = load("two workers", rows=4)
    job = Job(SHORT, 0, 16)
    expected, _ = run_masked(backend, plain(job), some_masks)
    ids = [token.id for token in expected]
    for length in range(10, 15):
        masks: Masks = lambda number, end=length: some_masks(number) if number < end else None  # type: ignore[misc]  # noqa: E731
        tokens, generation = run_masked(backend, predicting(job, ids, RIGHT, VOCAB), masks)
        assert choices_of(tokens) == choices_of(expected[:length]) and generation.finish_reason == "stop"
        assert generation._launch.accepted > 0


@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_cancelled_in_the_middle_of_a_pass(load: Load, sampling: str) -> None:
    backend = load("two workers", rows=4)
    job = Job(SHORT, 0, 24, **SAMPLINGS[sampling])
    whole = one_by_one(backend, job)
    predicted = predicting(job, whole.ids, RIGHT, VOCAB)
    assert answer(backend, predicted).told == whole.told
    steps, lengths = HostKernel.steps, []
    for seed in range(1, 6):
        HostKernel.schedule = replace(SCHEDULES[seed % 2], seed=seed, cancel_at=seed * steps // 7)
        sequence = backend.new_sequence()
        got = answer(backend, predicted, sequence)
        assert got.finish_reason == "cancelled"
        assert got.choices == whole.choices[: len(got.choices)]
        assert sequence.length == len(job.prompt) + max(0, len(got.choices) - 1)
        lengths.append(len(got.choices))
    assert max(lengths) > 8, "no pass with drafts was cancelled"
    HostKernel.schedule = SCHEDULES[0]
    assert answer(backend, predicted).told == whole.told


def test_a_request_without_drafts_after_one_with_them(load: Load) -> None:
    backend = load("two workers", rows=4)
    job = Job(SHORT, 0, 20, sampling=Sampling(temperature=1.0, seed=3))
    first = one_by_one(backend, job)
    with_drafts = answer(backend, predicting(job, first.ids, RIGHT, VOCAB))
    assert with_drafts.accepted > 0
    predicted = replace(predicting(job, first.ids, RIGHT, VOCAB), drafts=False)
    assert one_by_one(backend, predicted).told == first.told == with_drafts.told
