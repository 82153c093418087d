"""The monokernel with CDNA3's fragments, waves of 64 lanes and no ring, run on the host's machine: the same sources as
NVIDIA's, close to the reference and the same bits in any order of events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cpu_cases import distance, ids, reference
from backends.host_kernel import HostKernel, Schedule
from backends.host_sampling import check_sampling_in_any_order
from backends.host_setups import CONTEXT, SETUPS, TOLERANCE, VOCAB, Load, loading_from, make_checkpoints
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.protocol import Job, Sampling
from monotape.errors import DeadlineFault
from monotape.plan.gpu_machines import CDNA3

pytestmark = pytest.mark.long

SCHEDULES = (
    Schedule(seed=1),
    Schedule(seed=2, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
)
TOKENS = tuple(np.random.default_rng(5).integers(3, VOCAB, 80).tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("cdna3"))


@pytest.fixture
def load(place: Path) -> Iterator[Load]:
    with loading_from(place, "hip") as load:
        yield load


def test_the_plan_is_for_another_machine(load: Load) -> None:
    assert load("two workers").gpu_plan.machine is CDNA3


@pytest.mark.parametrize(
    ("setup", "ahead", "count"),
    [
        ("two workers", 0, 34),
        ("odd heads", 30, 4),
        ("splits", 62, 5),
        ("long tiles", 0, 3),
        ("many workers", 0, 4),
    ],
)
def test_token_by_token_in_any_order(load: Load, place: Path, setup: str, ahead: int, count: int) -> None:
    backend, want = load(setup), reference(place / SETUPS[setup][0], CONTEXT)
    exact = want.logits(TOKENS[: ahead + count], want.new_sequence())[ahead:]
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        sequence = backend.new_sequence()
        if ahead:
            backend.logits(TOKENS[:ahead], sequence)
        seen.append(backend.logits(TOKENS[ahead : ahead + count], sequence, chunk=0))
    assert distance(seen[0], exact) < TOLERANCE
    assert np.array_equal(*seen)


@pytest.mark.parametrize("setup", ["two workers", "odd heads", "splits", "shapes"])
def test_rows_in_any_order(load: Load, place: Path, setup: str) -> None:
    backend, want = load(setup), reference(place / SETUPS[setup][0], CONTEXT)
    exact, seen = want.logits(TOKENS[:70], want.new_sequence()), []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        sequence = backend.new_sequence()
        turns = [backend.logits(TOKENS[start:end], sequence) for start, end in ((0, 41), (41, 70))]
        seen.append(np.concatenate(turns))
    assert distance(seen[0], exact) < TOLERANCE
    assert np.array_equal(*seen)


@pytest.mark.parametrize("setup", ["two workers", "splits"])
def test_greedy_tokens_in_any_order(load: Load, place: Path, setup: str) -> None:
    backend, want = load(setup), reference(place / SETUPS[setup][0], CONTEXT)
    prompt, runs = TOKENS[:27], []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        runs.append(ids(list(backend.start(Job(prompt, 0, 9, (1000,)), backend.new_sequence()))))
    assert runs[0] == runs[1]
    logits = want.logits((*prompt, *runs[0][:-1]), want.new_sequence())[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(9), runs[0]]
    assert (behind <= TOLERANCE * np.linalg.norm(logits, axis=1)).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "top_k": 7, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.7},
    ],
)
def test_sampling_in_any_order(load: Load, settings: dict[str, Any]) -> None:
    job = Job((5, 9, 5), 0, 5, (9, 40), 2, Sampling(seed=77, **settings), logprobs=4)
    check_sampling_in_any_order(load("two workers"), job, SCHEDULES)


def test_a_missing_word_ends_in_a_deadline(load: Load) -> None:
    backend = load("two workers")
    backend.lose_word_of("gate_up")
    with pytest.raises(DeadlineFault, match="stage down in layer 0"):
        list(CudaGeneration(backend, Job(TOKENS[:5], 0, 5), backend.new_sequence(), 0))
