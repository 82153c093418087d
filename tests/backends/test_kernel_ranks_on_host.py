"""Ranks of the monokernel without a GPU: launches that run at the same time and talk through their inboxes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import distance, ids, reference
from backends.host_kernel import HostKernel, Schedule, host_gpu
from backends.host_ranks import (
    CONTEXT,
    DEADLINE_NS,
    LANES,
    SCHEDULES,
    SETTINGS,
    TOKENS,
    TOLERANCE,
    VOCAB,
    Load,
    checkpoints,
    loader,
)
from backends.host_sampling import check_sampling_in_any_order
from backends.host_setups import on_machines
from lane_models import make_laneformer
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.cuda.links import Numbers
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.backends.protocol import Job, Sampling
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.errors import BackendError, DeadlineFault, NumericalFault, ResourceError, UnsupportedModel
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

pytestmark = pytest.mark.long

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path, request: pytest.FixtureRequest) -> Iterator[Load]:
    with loader(place, request.param) as load:
        yield load


def agrees(backend: RankedCudaBackend, exact: Logits, count: int) -> None:
    """Token by token: close to the reference, and the same bits whatever order the machine chose."""
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        seen.append(backend.logits(TOKENS[:count], backend.new_sequence(), chunk=0))
    assert distance(seen[0], exact) < TOLERANCE
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


@on_machines("name, ranks, workers", [("llama", 2, 2), ("qwen2", 2, 2), ("qwen2", 4, 1)], hip=(2,))
def test_tensor_parallelism_in_any_order(
    load: Load, place: Path, name: str, ranks: int, workers: int
) -> None:
    want = reference(place / name, CONTEXT, tp=ranks)
    exact = want.logits(TOKENS[:5], want.new_sequence())
    agrees(load(name, workers, ranks), exact, 5)


@on_machines("name", list(SETTINGS), hip=(2,))
def test_every_way_to_share_in_any_order(load: Load, place: Path, name: str) -> None:
    want = reference(place / name, CONTEXT)
    exact = want.logits(TOKENS[:4], want.new_sequence())
    agrees(load(name, SETTINGS[name][1]), exact, 4)


@on_machines("name, tp", [("llama", 2), ("delay 2", None)], hip=(1,))
def test_greedy_tokens_cancelling_and_a_second_turn(
    load: Load, place: Path, name: str, tp: int | None
) -> None:
    backend, want = load(name, 2, tp), reference(place / name, CONTEXT, tp=tp)
    prompt, runs = TOKENS[:5], []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        generation = backend.start(Job(prompt, 0, 6, (1000,)), backend.new_sequence())
        runs.append(ids(list(generation)))
        assert generation.finish_reason == "length"
    assert runs[0] == runs[1]
    logits = want.logits((*prompt, *runs[0][:-1]), want.new_sequence())[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(6), runs[0]]
    assert (behind <= TOLERANCE * np.linalg.norm(logits, axis=1)).all()
    HostKernel.schedule = replace(SCHEDULES[1], cancel_at=HostKernel.steps // 2)
    sequence = backend.new_sequence()
    generation = backend.start(Job(prompt, 0, 6), sequence)
    tokens = ids(list(generation))
    assert generation.finish_reason == "cancelled"
    assert tokens == runs[0][: len(tokens)]
    assert len(tokens) < 6
    HostKernel.schedule = SCHEDULES[1]
    again = backend.start(Job((*prompt, *tokens), sequence.length, 6 - len(tokens)), sequence)
    assert tokens + ids(list(again)) == runs[0]


@on_machines(
    "settings",
    [
        {"temperature": 0.9, "top_k": 7, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.7, "frequency_penalty": 0.3},
        {"presence_penalty": 3.0, "logit_bias": ((9, 4.0), (2, 0.5), (9, 3.0))},
    ],
)
def test_sampling_in_any_order(load: Load, settings: dict[str, Any]) -> None:
    """What the reference draws from the kernel's own logits, and their log-probabilities."""
    job = Job((5, 9, 5), 0, 4, (9, 40), 2, Sampling(seed=77, **settings), logprobs=4)
    check_sampling_in_any_order(load("qwen2", 2, 2), job, SCHEDULES)


@on_machines(
    "name, tp, stage", [("qwen2", 2, "output"), ("delay 2", None, r"\w+"), ("silent", None, "head")]
)  # fmt: skip
def test_a_rank_that_stops_is_named(load: Load, name: str, tp: int | None, stage: str) -> None:
    """Before the first token of the prompt and after two of the output; what comes next is not harmed."""
    backend = load(name, 2, tp)
    healthy = ids(list(backend.start(Job(TOKENS[:3], 0, 4), backend.new_sequence())))
    for rank, after in ((len(backend.ranks) - 1, 0), (0, 2)):
        backend.stop_rank(rank, after)
        sequence = backend.new_sequence()
        expected = rf"^Rank \d waited too long for rank {rank} in stage {stage} of layer \d, for word \d+ at"
        with pytest.raises(DeadlineFault, match=expected):
            list(CudaGeneration(backend, Job(TOKENS[:3], 0, 4), sequence, chunk=0))
        assert sequence.length == 0
    backend.stop_rank(None)
    assert ids(list(backend.start(Job(TOKENS[:3], 0, 4), backend.new_sequence()))) == healthy


@on_machines()
def test_a_worker_that_stops_is_named_with_its_rank(load: Load) -> None:
    """Its peers give up first but are not blamed: the rank's own report names the cause."""
    backend = load("qwen2", 2, 2)
    backend.ranks[1].lose_word_of("gate_up")
    with pytest.raises(DeadlineFault, match=r"Worker \d of rank 1 waited too long .* stage down in layer 0"):
        list(backend.start(Job(TOKENS[:3], 0, 4), backend.new_sequence()))


@on_machines()
def test_a_nan_of_one_rank_ends_all(load: Load) -> None:
    backend = load("qwen2", 2, 2)
    tapes = backend.ranks[1].memories_of(["tapes"])["tapes"]
    tapes.write(np.full(256, 0x7FC0, np.uint16))
    with pytest.raises(NumericalFault, match="Stage qkv of layer 0"):
        list(backend.start(Job(TOKENS[:3], 0, 4), backend.new_sequence()))


@on_machines()
def test_late_words_change_no_bit(load: Load) -> None:
    backend = load("delay 2", 2, link_delay=True)
    expected = backend.logits(TOKENS[:4], backend.new_sequence(), chunk=0)
    steps = HostKernel.steps
    backend.delay_links(300_000)
    assert np.array_equal(backend.logits(TOKENS[:4], backend.new_sequence(), chunk=0), expected)
    assert HostKernel.steps != steps  # they were late


@on_machines()
def test_with_fewer_slots_a_word_is_overwritten_and_noticed(load: Load) -> None:
    """The tests above can fail: the rank that still needed it waits for ever."""
    backend = load("qwen2", 2, 2, fewer_slots=1)

    def many_schedules() -> None:
        for seed in range(30):
            HostKernel.schedule = Schedule(seed=seed, delay_steps=20_000, favour_steps=60_000)
            backend.logits(TOKENS[:4], backend.new_sequence(), chunk=0)

    with pytest.raises(DeadlineFault, match=r"Rank \d waited too long for rank \d"):
        many_schedules()


@on_machines(fixture="gpu")
def test_a_rank_alone_hears_itself(place: Path, gpu: str) -> None:
    """The share of one rank, looped back: what an experiment runs. The numbers mean nothing, but are repeatable."""
    with host_gpu():
        checkpoint = open_checkpoint(place / "delay 2")
        spec = spec_from_config(checkpoint.config)
        plan = gpu_plan(spec, 2, CONTEXT, tuning=Tuning(link_delay=True), backend=gpu)
        backend = CudaBackend.load(spec, plan, checkpoint)
        backend.loop_back()
        backend._params.deadline_ns = DEADLINE_NS
        runs = []
        for delay, schedule in zip((0, 200_000), SCHEDULES, strict=False):
            HostKernel.schedule = schedule
            backend.delay_links(delay)
            runs.append(ids(list(backend.start(Job(TOKENS[:3], 0, 4), backend.new_sequence()))))
        assert runs[0] == runs[1]
        assert max(runs[0]) < VOCAB // 2
        backend.close()


@on_machines()
def test_numbers_start_again_before_they_run_out(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monotape.backends.cuda.links._LAST_NUMBER", 600)
    backend = load("qwen2", 2, 2)
    job, seen = Job(TOKENS[:3], 0, 3), []
    for _ in range(5):
        seen.append(ids(list(backend.start(job, backend.new_sequence()))))
    assert all(tokens == seen[0] for tokens in seen)
    assert backend._numbers.send < 1200


def fails_once(error: Exception, real: Any) -> Any:
    faults = [error]

    def call(*arguments: Any, **options: Any) -> Any:
        if faults:
            raise faults.pop()
        return real(*arguments, **options)

    return call


@on_machines()
def test_a_rank_that_is_short_of_memory_leaves_all_in_step(load: Load) -> None:
    """A request is begun again when kept conversations have given way; by then no rank may be ahead of another."""
    backend, job = load("qwen2", 2, 2), Job(TOKENS[:3], 0, 3)
    expected = ids(list(backend.start(job, backend.new_sequence())))
    sequence = backend.new_sequence()
    second = sequence.parts[1]
    second.reserve = fails_once(ResourceError("The GPU has too little free memory."), second.reserve)  # type: ignore[method-assign]
    with pytest.raises(ResourceError):
        backend.start(job, sequence)
    for _ in range(2):
        assert ids(list(backend.start(job, sequence))) == expected


@on_machines()
def test_a_rank_that_cannot_be_launched_keeps_no_other_busy(load: Load) -> None:
    backend, job = load("qwen2", 2, 2), Job(TOKENS[:3], 0, 3)
    expected = ids(list(backend.start(job, backend.new_sequence())))
    second = backend.ranks[1]
    second.launch = fails_once(ResourceError("Too many blocks.", "Free some."), second.launch)  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="Too many blocks"):
        backend.start(job, backend.new_sequence())
    assert ids(list(backend.start(job, backend.new_sequence()))) == expected


def test_numbers_are_used_once() -> None:
    numbers = Numbers()
    first, second = numbers.take(10, 4, 6), numbers.take(10, 4, 6)
    assert first == (0, 1, 1)
    assert second[0] >= first[0] + 11 * 4
    assert second[1] >= first[1] + 11
    assert second[2] >= first[2] + 10 * 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head_type": "lane"}, "does not run a head that reads the lanes' 'concatenate'"),
        (
            {"num_attention_heads": 16, "num_key_value_heads": 16, "num_lanes": 16, "vocab_size": 128},
            "does not run 16 ranks",
        ),
    ],
)
def test_what_the_kernel_does_not_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    make_laneformer(tmp_path, **{**LANES, "hidden_size": 256, **changes})
    spec = spec_from_config(open_checkpoint(tmp_path).config)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        gpu_plan(spec, 2, CONTEXT)
    assert caught.value.hint
