"""The monokernel without a GPU: its own sources, run by fibers in orders that a GPU would rarely show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cpu_cases import distance, ids, reference
from backends.host_kernel import HostKernel, Schedule
from backends.host_sampling import check_sampling_in_any_order, drawn_in_any_order
from backends.host_setups import (
    CONTEXT,
    SETUPS,
    TOLERANCE,
    VOCAB,
    Load,
    checkpoints,
    loading_from,
    on_machines,
)
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.cuda.params import place_table
from monotape.backends.protocol import Job, KvSequence, Sampling
from monotape.errors import DeadlineFault, NumericalFault
from monotape.plan.gpu import BATCH_TILES

pytestmark = pytest.mark.slow
on_both = partial(
    on_machines, amd=[pytest.mark.long]
)  # of AMD's machine, CI runs these and test_kernel_dies.py

SCHEDULES = (
    Schedule(seed=1),
    Schedule(seed=2, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
    Schedule(seed=3, stalls_per_million=40, stall_steps=100_000, delay_steps=3000, favour_steps=200_000),
)
PATHS = {"rows": None, "token by token": 0}  # how the prompt is taken: the chunk
# About as many tokens survive as a worker can gather: one a thread, of which AMD's has twice as many.
SOME_ELECTED = {
    "cuda": ("long tiles", {"temperature": 1.0, "top_p": 0.995}),
    "hip": ("many words", {"temperature": 1.0, "top_p": 0.99}),
}
TOKENS = tuple(np.random.default_rng(5).integers(3, VOCAB, 80).tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path, request: pytest.FixtureRequest) -> Iterator[Load]:
    with loading_from(place, request.param) as load:
        yield load


@on_both(
    "setup, ahead, count, schedules",  # ahead: positions that the prefill takes first
    [
        ("two workers", 0, 38, 1),
        ("two workers", 29, 6, 3),
        ("odd heads", 30, 4, 3),
        ("splits", 28, 9, 3),
        ("splits", 62, 5, 3),
        ("two batches", 0, 3, 1),
    ],
    hip=(2, 4),
)
def test_token_by_token_in_any_order(
    load: Load, place: Path, setup: str, ahead: int, count: int, schedules: int
) -> None:
    """Close to the reference, and the same bits whatever order the machine chose."""
    backend, want = load(setup), reference(place / SETUPS[setup][0], CONTEXT)
    exact = want.logits(TOKENS[: ahead + count], want.new_sequence())[ahead:]
    seen = []
    for schedule in SCHEDULES[:schedules]:
        HostKernel.schedule = schedule
        sequence = backend.new_sequence()
        if ahead:
            backend.logits(TOKENS[:ahead], sequence)
        seen.append(backend.logits(TOKENS[ahead : ahead + count], sequence, chunk=0))
    assert distance(seen[0], exact) < TOLERANCE
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


@on_both()
def test_tiles_that_take_several_pages(load: Load, place: Path) -> None:
    backend, want = load("long tiles", 16), reference(place / "long", CONTEXT)
    exact = want.logits(TOKENS[:4], want.new_sequence())
    seen = []
    for schedule in SCHEDULES[:2]:
        HostKernel.schedule = schedule
        seen.append(backend.logits(TOKENS[:4], backend.new_sequence(), chunk=0))
    assert distance(seen[0], exact) < TOLERANCE
    assert np.array_equal(*seen)


@on_both(
    "size, batch",
    [
        (24, 12),
        *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((20, 10), (28, 14))),
    ],
)
def test_batches_of_any_length(load: Load, place: Path, size: int, batch: int) -> None:
    """Tiles of two blocks: half of a page's are multiplied together, and a batch is as many twice.

    Every batch assigns tiles to other threads, which shows a bias or a row that belongs to another tile.
    """
    backend, want = load("two batches", size), reference(place / "broad", CONTEXT)
    if not backend.gpu_plan.machine.ring:  # no pages: a batch is as long as it can be
        batch = BATCH_TILES
    assert batch in {product.batch for product in backend.gpu_rank.products if product.blocks == 2}
    exact = want.logits(TOKENS[:3], want.new_sequence())
    seen = []
    for schedule in SCHEDULES[:2]:
        HostKernel.schedule = schedule
        seen.append(backend.logits(TOKENS[:3], backend.new_sequence(), chunk=0))
    assert distance(seen[0], exact) < TOLERANCE
    assert np.array_equal(*seen)


@on_both(
    "setup, ends",  # of turns: the second begins in the middle of a unit
    [
        ("two workers", (41, 70)),
        ("odd heads", (41, 70)),
        ("splits", (41, 70)),
        ("splits", (30, 64)),  # a split that is one unit would be filled up with another that its rows see
        ("splits", (30, 80)),
        ("shapes", (70,)),
    ],
    hip=(1, 4),
)
def test_rows_in_any_order(load: Load, place: Path, setup: str, ends: tuple[int, ...]) -> None:
    backend, want = load(setup), reference(place / SETUPS[setup][0], CONTEXT)
    exact = want.logits(TOKENS[: ends[-1]], want.new_sequence())
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        sequence = backend.new_sequence()
        turns = [
            backend.logits(TOKENS[start:end], sequence) for start, end in zip((0, *ends), ends, strict=False)
        ]
        seen.append(np.concatenate(turns))
    assert distance(seen[0], exact) < TOLERANCE
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


@on_both("setup", ["two workers", "odd heads", "splits"])
def test_greedy_tokens_in_any_order(load: Load, place: Path, setup: str) -> None:
    """A prompt by rows, then decoding over the edge of a unit; each token is the best, or as good as that."""
    backend, want = load(setup), reference(place / SETUPS[setup][0], CONTEXT)
    prompt, runs = TOKENS[:27], []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        generation = backend.start(Job(prompt, 0, 9, (1000,)), backend.new_sequence())
        runs.append(ids(list(generation)))
        assert generation.finish_reason == "length"
    assert all(run == runs[0] for run in runs[1:])
    logits = want.logits((*prompt, *runs[0][:-1]), want.new_sequence())[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(9), runs[0]]
    assert (behind <= TOLERANCE * np.linalg.norm(logits, axis=1)).all()


@on_both(
    "setup, settings",
    [
        ("two workers", {"temperature": 0.9, "top_k": 7, "top_p": 0.9}),
        (
            "two workers",
            {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.7, "frequency_penalty": 0.3},
        ),
        ("two workers", {"presence_penalty": 3.0, "logit_bias": ((9, 4.0), (2, 0.5), (9, 3.0))}),
        ("splits", {"temperature": 2.0, "top_p": 0.95}),
        ("splits", {"temperature": 1.5, "top_k": 3, "min_p": 0.01, "presence_penalty": 0.5}),
    ],
    hip=(1, 4),
)
def test_sampling_in_any_order(load: Load, setup: str, settings: dict[str, Any]) -> None:
    """What the reference draws from the kernel's own logits, and their log-probabilities."""
    job = Job((5, 9, 5), 0, 5, (9, 40), 2, Sampling(seed=77, **settings), logprobs=4)
    check_sampling_in_any_order(load(setup), job, SCHEDULES)


@on_both(
    "setup, settings",
    [
        ("two workers", {"temperature": 0.9, "top_k": 7, "top_p": 0.9}),
        ("splits", {"temperature": 1.5, "top_k": 3}),
        SOME_ELECTED["cuda"],
        pytest.param(*SOME_ELECTED["hip"], marks=pytest.mark.long),
    ],
    hip=(3,),
)
def test_tokens_that_everybody_knows_without_an_election(
    load: Load, setup: str, settings: dict[str, Any]
) -> None:
    job = Job((5, 9, 5), 0, 12, sampling=Sampling(seed=7, **settings))
    for tokens, _ in drawn_in_any_order(load(setup), job, SCHEDULES):
        assert len(tokens) == 12


@on_both()
def test_some_tokens_need_an_election_and_others_do_not(load: Load, request: pytest.FixtureRequest) -> None:
    """Of the request above: else it would not show that both kinds can follow each other."""
    setup, settings = SOME_ELECTED[request.node.callspec.params["load"]]
    backend, seen = load(setup), set()
    for tokens in range(1, 8):
        job = Job((5, 9, 5), 0, tokens, sampling=Sampling(seed=7, **settings))
        list(CudaGeneration(backend, job, backend.new_sequence(), chunk=0))
        seen.add(ended_with_an_election(backend))
    assert seen == {True, False}


def ended_with_an_election(backend: CudaBackend) -> bool:
    """Then its words are still there."""
    memory, buffer = backend._memories["exchange"], backend.gpu_rank.buffer("candidates")
    words = memory.read(np.empty(memory.bytes, np.uint8)).view(np.uint32).reshape(-1, 4)
    return bool((words[buffer.start : buffer.start + buffer.copies * buffer.words] != 0xFFFFFFFF).any())


@on_both("path, sampled", [(path, sampled) for path in PATHS for sampled in (False, True)], hip=(3,))
def test_cancel(load: Load, path: str, sampled: bool) -> None:
    """At any time: the kernel ends, and what it says fits."""
    sampling = Sampling(temperature=1.0, top_k=5) if sampled else Sampling()
    backend, chunk = load("two workers"), PATHS[path]
    prompt = TOKENS[:12]
    job = Job(prompt, 0, 6, sampling=sampling)
    whole = ids(list(CudaGeneration(backend, job, backend.new_sequence(), chunk)))
    steps, reasons = HostKernel.steps, []
    for seed, share in enumerate((0.0, 0.1, 0.5, 0.9)):
        HostKernel.schedule = replace(SCHEDULES[0], seed=seed, cancel_at=int(share * steps))
        sequence = backend.new_sequence()
        generation = CudaGeneration(backend, job, sequence, chunk)
        tokens = ids(list(generation))
        assert tokens == whole[: len(tokens)]
        assert sequence.length == (12 + len(tokens) - 1 if tokens else generation.filled)
        reasons.append(generation.finish_reason)
    assert reasons[:3] == ["cancelled"] * 3


@on_both("cached", [0, 7], hip=(1,))
def test_a_cancelled_prefill_keeps_whole_chunks(load: Load, cached: int) -> None:
    """A retry continues there, and the answer is that of a job that was never cancelled, bit for bit."""
    backend, prompt, chunk = load("two workers"), TOKENS[:60], 16
    job = Job(prompt, cached, 3, sampling=Sampling(temperature=1.0), logprobs=3)

    def answer(job: Job, sequence: KvSequence) -> list[tuple[int, float | None]]:
        return [(token.id, token.logprob) for token in CudaGeneration(backend, job, sequence, chunk)]

    def begun() -> KvSequence:
        sequence = backend.new_sequence()
        if cached:
            backend.logits(prompt[:cached], sequence, chunk)
        return sequence

    HostKernel.schedule = SCHEDULES[0]
    whole = answer(job, begun())
    steps, kept = HostKernel.steps, []
    for seed in range(8):
        sequence = begun()
        HostKernel.schedule = replace(SCHEDULES[seed % 2], seed=seed, cancel_at=seed * steps // 12)
        if answer(job, sequence):
            continue
        assert sequence.length in (cached, *range(cached + chunk, 60, chunk), 60)
        kept.append(sequence.length)
        HostKernel.schedule = SCHEDULES[0]
        assert answer(replace(job, cached=min(sequence.length, 59)), sequence) == whole
    assert min(kept) == cached < max(kept)


@on_both("path, stage", [(path, stage) for path in PATHS for stage in ("qkv", "gate_up")], hip=(0, 3))
def test_a_missing_word_ends_in_a_deadline(load: Load, path: str, stage: str) -> None:
    """Of the path of decoding: a prefill does not look at the spans of the stages."""
    backend = load("two workers")
    backend.lose_word_of(stage)
    after = {"qkv": "attention", "gate_up": "down"}[stage]
    expected = (
        rf"Worker \d waited too long for word \d+ of the input of stage {after} in layer 0, at position \d+\."
    )
    with pytest.raises(DeadlineFault, match=expected):
        list(CudaGeneration(backend, Job(TOKENS[:5], 0, 5), backend.new_sequence(), PATHS[path]))


@on_both("stage, layer", [("down", 1), ("head", 2)])
def test_a_nan_in_the_weights_is_a_fault_that_says_where(load: Load, stage: str, layer: int) -> None:
    backend = load("odd heads")
    places, first = place_table(backend.plan)
    index = [item.name for item in backend.plan.ranks[0].stages].index(stage)
    start, stride = places[first[index] + backend.plan.ranks[0].stages[index].tiles - 1].tolist()
    backend._memories["tapes"].write(np.full(256, 0x7FC0, np.uint16), start + stride * layer)
    where = "Stage head" if stage == "head" else f"Stage {stage} of layer {layer}"
    sequence = backend.new_sequence()
    with pytest.raises(NumericalFault, match=where):
        list(CudaGeneration(backend, Job(TOKENS[:3], 0, 5), sequence, chunk=0))
    with pytest.raises(NumericalFault, match="not numbers"):
        list(backend.start(Job(TOKENS[:30], 0, 5), sequence))
    assert sequence.length == 0


@on_both()
def test_a_run_that_does_not_end_is_called_off(load: Load) -> None:
    """And the message says what every fiber was doing."""
    backend = load("two workers")
    HostKernel.schedule = Schedule(most_steps=1000)
    with pytest.raises(AssertionError, match=r"It takes too long\. Block 0: 0 "):
        backend.logits(TOKENS[:3], backend.new_sequence())
