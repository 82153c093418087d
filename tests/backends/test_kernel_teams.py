"""Two teams of warps in a worker: helpers multiply every other step, and end with the consumers, however that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import distance, ids, reference
from backends.host_kernel import HostKernel, Schedule
from backends.host_setups import CONTEXT, SETUPS, TOLERANCE, VOCAB, Load, loading_from, make_checkpoints
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.protocol import Job
from monotape.errors import DeadlineFault

SCHEDULES = (
    Schedule(seed=1),
    Schedule(seed=2, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
    Schedule(seed=3, stalls_per_million=40, stall_steps=100_000, delay_steps=3000, favour_steps=200_000),
)
TOKENS = tuple(np.random.default_rng(5).integers(3, VOCAB, 80).tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("teams"))


@pytest.fixture
def load(place: Path) -> Iterator[Load]:
    with loading_from(place) as load:
        yield load


@pytest.mark.parametrize(
    ("setup", "page", "ahead", "count"),  # ahead: positions that the prefill takes first
    [
        ("fewer workers than heads", None, 40, 4),
        pytest.param("two workers", None, 29, 6, marks=pytest.mark.long),
        pytest.param("long tiles", 16, 0, 4, marks=pytest.mark.long),  # a tile takes three pages
        pytest.param("two batches", None, 0, 3, marks=pytest.mark.long),
        pytest.param(
            "many workers", None, 30, 3, marks=pytest.mark.long
        ),  # most have no tiles of some stages
        pytest.param("many splits", None, 62, 4, marks=pytest.mark.long),
    ],
)
def test_any_order_gives_the_same_bits(
    load: Load, place: Path, setup: str, page: int | None, ahead: int, count: int
) -> None:
    backend, want = load(setup, page, teams=2), reference(place / SETUPS[setup][0], CONTEXT)
    exact = want.logits(TOKENS[: ahead + count], want.new_sequence())[ahead:]
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        sequence = backend.new_sequence()
        if ahead:
            backend.logits(TOKENS[:ahead], sequence)
        seen.append(backend.logits(TOKENS[ahead : ahead + count], sequence, chunk=0))
    assert distance(seen[0], exact) < TOLERANCE
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


def test_a_request_that_is_cancelled_at_any_time(load: Load) -> None:
    """A prompt by rows, of which the helpers see nothing, then tokens; the kernel ends, and what it says fits."""
    backend, job = load("two workers", teams=2), Job(TOKENS[:12], 0, 6)
    whole = ids(list(backend.start(job, backend.new_sequence())))
    assert len(whole) == 6
    steps = HostKernel.steps
    for seed, share in enumerate((0.0, 0.3, 0.6, 0.9)):
        HostKernel.schedule = replace(SCHEDULES[0], seed=seed, cancel_at=int(share * steps))
        tokens = ids(list(backend.start(job, backend.new_sequence())))
        assert tokens == whole[: len(tokens)]


@pytest.mark.parametrize("stage", [pytest.param("qkv", marks=pytest.mark.long), "gate_up"])
def test_a_missing_word_ends_in_a_deadline(load: Load, stage: str) -> None:
    backend = load("two workers", teams=2)
    backend.lose_word_of(stage)
    with pytest.raises(DeadlineFault, match=r"waited too long for word"):
        list(CudaGeneration(backend, Job(TOKENS[:5], 0, 5), backend.new_sequence(), chunk=0))
