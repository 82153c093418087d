"""A prompt in rows on several ranks of the monokernel, without a GPU: sends, meetings, and how the ranks stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import distance, ids, reference
from backends.host_kernel import HostKernel, Schedule
from backends.host_ranks import (
    CONTEXT,
    MANY_RANKS,
    SCHEDULES,
    SETTINGS,
    TOKENS,
    TOLERANCE,
    Load,
    checkpoints,
    loader,
)
from backends.host_setups import on_machines
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.backends.protocol import Job
from monotape.backends.reference.sampler import logprobs
from monotape.compiler.gpu import links
from monotape.errors import DeadlineFault, NumericalFault

pytestmark = pytest.mark.long

COUNT, CHUNK = 23, 4  # rows, in so few at a time that a prompt takes several chunks, the last one shorter
Logits = NDArray[np.float32]
#: A name, its ranks where it has no lanes, and workers.
MODELS = [
    ("llama", 2, 3), ("qwen2", 2, 2), ("qwen2", 4, 1), ("eight", 8, 1), ("odd width", 2, 2), ("wide", 2, 3),
    ("long", 2, 3),
    *((name, None, workers) for name, (_, workers) in (SETTINGS | MANY_RANKS).items()),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path, request: pytest.FixtureRequest) -> Iterator[Load]:
    with loader(place, request.param) as load:
        yield load


def in_two_turns(backend: RankedCudaBackend, chunk: int | None) -> Logits:
    """The second begins where nothing else does."""
    sequence = backend.new_sequence()
    return np.concatenate([backend.logits(part, sequence, chunk) for part in (TOKENS[:7], TOKENS[7:COUNT])])


@on_machines(
    "name, tp, workers",
    [
        case if number < 8 else pytest.param(*case, marks=pytest.mark.wide)
        for number, case in enumerate(MODELS)
    ],
    hip=(6, 7),
)
def test_logits_of_all_rows_in_any_order(
    load: Load, place: Path, name: str, tp: int | None, workers: int
) -> None:
    """Close to the reference, and the same bits whatever order the machine chose."""
    backend, want = load(name, workers, tp), reference(place / name, CONTEXT, tp=tp)
    exact = want.logits(TOKENS[:COUNT], want.new_sequence())
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        at_once = backend.logits(TOKENS[:COUNT], backend.new_sequence())
        seen.append((in_two_turns(backend, CHUNK), at_once))
    for first, second in zip(*seen, strict=True):
        assert distance(first, exact) < TOLERANCE
        assert np.array_equal(first, second)


@on_machines("name, tp, workers", [("llama", 2, 3), ("delay 2", None, 2), ("silent", None, 2)], hip=(1,))
def test_tokens_after_a_prompt_in_any_order(
    load: Load, place: Path, name: str, tp: int | None, workers: int
) -> None:
    """The head has the last row alone, of which it may have to read all lanes."""
    backend, want = load(name, workers, tp), reference(place / name, CONTEXT, tp=tp)
    prompt, runs = TOKENS[: CHUNK * 2 + 1], []
    for schedule in SCHEDULES:
        for chunk in (CHUNK, None):
            HostKernel.schedule = schedule
            runs.append(ids(list(CudaGeneration(backend, Job(prompt, 0, 4), backend.new_sequence(), chunk))))
    assert all(run == runs[0] for run in runs[1:])
    logits = want.logits((*prompt, *runs[0][:-1]), want.new_sequence())[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(4), runs[0]]
    assert (behind <= TOLERANCE * np.linalg.norm(logits, axis=1)).all()


@on_machines("name", ["ladder of three, summed head", "silent"])
def test_the_first_token_is_of_what_all_lanes_say(load: Load, place: Path, name: str) -> None:
    """Their sum, or mean: the log-probabilities of the last row are the reference's."""
    backend, want = load(name, 2), reference(place / name, CONTEXT)
    for length in range(3, 9):
        prompt = TOKENS[length : 2 * length]
        exact = want.logits(prompt, want.new_sequence())[-1]
        job = Job(prompt, 0, 1, logprobs=5)
        (token,) = CudaGeneration(backend, job, backend.new_sequence(), CHUNK)
        for id, value in token.top_logprobs:
            assert value == pytest.approx(logprobs(exact, id, 1)[0], abs=0.01 * float(np.linalg.norm(exact)))


@on_machines("name, tp", [("qwen2", 2), ("delay 2", None), ("silent", None)])
def test_a_cancelled_prefill_ends_in_all_ranks_at_once(load: Load, name: str, tp: int | None) -> None:
    """At any time. If ranks did not stop at the same meeting, one of them would wait for another."""
    backend, job = load(name, 2, tp), Job(TOKENS[:COUNT], 0, 2)
    whole = ids(list(CudaGeneration(backend, job, backend.new_sequence(), CHUNK)))
    steps, reasons, kept = HostKernel.steps, [], set()
    for seed in range(12):
        HostKernel.schedule = replace(SCHEDULES[seed % 2], seed=seed, cancel_at=seed * steps // 24)
        sequence = backend.new_sequence()
        generation = CudaGeneration(backend, job, sequence, CHUNK)
        tokens = ids(list(generation))
        reasons.append(generation.finish_reason)
        assert tokens == whole[: len(tokens)]
        if tokens:
            assert sequence.length == COUNT + len(tokens) - 1
        else:  # whole chunks are kept, the same of all ranks
            assert sequence.length in (0, *range(CHUNK, COUNT, CHUNK), COUNT)
            kept.add(sequence.length)
        assert len({part.length for part in sequence.parts}) == 1
    assert reasons[:8] == ["cancelled"] * 8
    assert len(kept) > 1
    HostKernel.schedule = SCHEDULES[0]
    assert ids(list(CudaGeneration(backend, job, backend.new_sequence(), CHUNK))) == whole


@on_machines("name, tp", [("qwen2", 4), ("silent", None)], hip=(1,))
def test_a_rank_that_does_not_start_is_named(load: Load, name: str, tp: int | None) -> None:
    backend, job = load(name, 2, tp), Job(TOKENS[:COUNT], 0, 2)
    healthy = ids(list(backend.start(job, backend.new_sequence())))
    for rank in (0, len(backend.ranks) - 1):
        backend.stop_rank(rank)
        sequence = backend.new_sequence()
        expected = (
            rf"^Rank \d waited too long for rank {rank} in stage rows of layer 0, for word 0 at position 0"
        )
        with pytest.raises(DeadlineFault, match=expected):
            list(backend.start(job, sequence))
        assert sequence.length == 0
    backend.stop_rank(None)
    assert ids(list(backend.start(job, backend.new_sequence()))) == healthy


@on_machines()
def test_a_rank_that_stops_later_is_named_with_the_position(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves after the first chunk, as if it had been told of a shorter prompt."""
    backend = load("qwen2", 2, 2)

    def told_less(rank: object, job: Job) -> Job:
        return replace(job, prompt=job.prompt[:CHUNK]) if rank is backend.ranks[1] else job

    monkeypatch.setattr(backend, "_job_of", told_less)
    expected = f"^Rank 0 waited too long for rank 1 in stage rows of layer 0, for word 0 at position {CHUNK}"
    with pytest.raises(DeadlineFault, match=expected):
        list(CudaGeneration(backend, Job(TOKENS[:COUNT], 0, 2), backend.new_sequence(), CHUNK))


@on_machines()
def test_a_nan_of_one_rank_ends_all(load: Load) -> None:
    backend = load("delay 2", 2)
    tapes = backend.ranks[1].memories_of(["tapes"])["tapes"]
    tapes.write(np.full(256, 0x7FC0, np.uint16))
    sequence = backend.new_sequence()
    with pytest.raises(NumericalFault, match="Stage qkv of layer 0"):
        list(CudaGeneration(backend, Job(TOKENS[:COUNT], 0, 4), sequence, CHUNK))
    assert sequence.length == 0


@on_machines()
def test_late_meetings_change_no_bit(load: Load) -> None:
    backend = load("delay 2", 2, link_delay=True)
    expected = backend.logits(TOKENS[:COUNT], backend.new_sequence(), CHUNK)
    steps = HostKernel.steps
    backend.delay_links(300_000)
    assert np.array_equal(backend.logits(TOKENS[:COUNT], backend.new_sequence(), CHUNK), expected)
    assert HostKernel.steps != steps  # they were late


@on_machines("name, tp", [("qwen2", 2), ("ladder of three, summed head", None)])
def test_with_fewer_slots_rows_are_overwritten(
    load: Load, monkeypatch: pytest.MonkeyPatch, name: str, tp: int | None
) -> None:
    """The tests above can fail: a rank that is ahead stores over what another has yet to fold."""
    fewer = links.row_slots
    monkeypatch.setattr(links, "row_slots", lambda plan: fewer(plan) - 1)
    backend, seen = load(name, 2, tp), set()
    for seed in range(60):
        HostKernel.schedule = Schedule(seed=seed, delay_steps=20_000, favour_steps=60_000)
        seen.add(backend.logits(TOKENS[:COUNT], backend.new_sequence(), CHUNK).tobytes())
        if len(seen) > 1:
            return
    pytest.fail("one slot fewer makes no difference")


@on_machines()
def test_rows_stay_within_the_memory_that_was_planned(load: Load, place: Path) -> None:
    """A full chunk, in an inbox that ends at a guard page."""
    backend = load("llama", 2, 2, context=129)
    want = reference(place / "llama", 129, tp=2)
    exact = want.logits(TOKENS[:129], want.new_sequence())
    assert backend.ranks[0]._params.chunk == 256
    assert distance(backend.logits(TOKENS[:129], backend.new_sequence(), 128), exact) < TOLERANCE
