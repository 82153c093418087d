"""Several ranks on the CPU: the numbers of one rank or of the reference, whatever arrives when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cpu_cases import PROMPT, cpu, generate, ids, reference
from backends.rank_cases import EIGHT, make_eight
from backends.test_cpu_numbers import distance, eight_bits, transformers_logits
from families import CASES
from lane_models import SETTINGS, in_modules, make_laneformer
from monotape.backends.cpu import model as cpu_model
from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.protocol import Job, Sampling
from monotape.compiler.compile import compile_plan
from monotape.errors import DeadlineFault, NumericalFault
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.plan.types import Machine
from monotape.weights.open import open_checkpoint
from real_models import smollm2

pytestmark = pytest.mark.slow

ULP = float(np.finfo(np.float32).eps)
LANE_TOKENS = tuple(np.random.default_rng(5).integers(0, 131, 29).tolist())
Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """The folder of a checkpoint with eight heads."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_eight(name, tmp_path_factory.mktemp(f"eight-{name}"))
        return made[name]

    return folder


def logits(backend: CpuBackend, tokens: tuple[int, ...]) -> np.ndarray:
    return backend.logits(tokens, backend.new_sequence())


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_ranks_are_no_worse_than_twice_an_honest_evaluation(eight: Maker, case: str) -> None:
    """Exact: transformers in float64. Honest: transformers in float32, on one device."""
    import torch

    folder, context = eight(case), EIGHT[case].context
    exact = transformers_logits(folder, torch.float64)
    bound = 2 * distance(transformers_logits(folder, torch.float32), exact) + ULP
    for ranks in (2, 4, 8):
        with cpu(folder, "f32", None, context, tp=ranks) as backend:
            assert len(backend.plan.ranks) == ranks
            assert distance(logits(backend, PROMPT), exact) <= bound


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["bf16", "f16", "q8"])
def test_ranks_in_low_precision(eight: Maker, dtype: str) -> None:
    import torch

    honest_dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "q8": torch.float32}[dtype]
    for case in ("qwen2", "phi3"):
        folder = eight(case)
        exact = transformers_logits(folder, torch.float64)
        honest = transformers_logits(folder, honest_dtype, through_q8=dtype == "q8")
        for ranks in (2, 8):
            with cpu(folder, dtype, None, tp=ranks) as backend:
                assert distance(logits(backend, PROMPT), exact) <= 2 * distance(honest, exact) + ULP


@pytest.mark.parametrize("case", ["llama", "qwen2-mixed-windows", "qwen3", "phi3-longrope-long"])
def test_greedy_tokens_of_ranks_are_those_of_one(eight: Maker, case: str) -> None:
    folder = eight(case)
    expected = ids(generate(reference(folder), PROMPT[:9], 40))
    assert ids(generate(reference(folder, tp=4), PROMPT[:9], 40)) == expected
    for ranks in (1, 2, 4, 8):
        with cpu(folder, "f32", None, tp=ranks) as backend:
            assert ids(generate(backend, PROMPT[:9], 40)) == expected


def test_ranks_of_the_reference_agree_with_one(eight: Maker) -> None:
    for case in ("llama-tied", "qwen2", "phi3"):
        one = reference(eight(case))
        want = one.logits(PROMPT, one.new_sequence())
        for ranks in (2, 4, 8):
            backend = reference(eight(case), tp=ranks)
            got = backend.logits(PROMPT, backend.new_sequence())
            assert distance(got, want.astype(np.float64)) < 1e-5


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("delay", [0, 1, 2, 4])
def test_delays_are_those_of_the_reference(tmp_path: Path, lanes: int, delay: int) -> None:
    make_laneformer(tmp_path, num_lanes=lanes, **in_modules(delay))
    agrees_with_reference(tmp_path)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_that_of_the_reference(tmp_path: Path, name: str) -> None:
    make_laneformer(tmp_path, **SETTINGS[name])
    agrees_with_reference(tmp_path)


def agrees_with_reference(folder: Path) -> None:
    """Logits close, tokens equal, and the same bits at once and token by token."""
    judge = reference(folder)
    want = judge.logits(LANE_TOKENS, judge.new_sequence())
    with cpu(folder, "f32", None) as backend:
        got = logits(backend, LANE_TOKENS)
        assert distance(got, want.astype(np.float64)) < 5e-6
        sequence = backend.new_sequence()
        pieces = [backend.logits(LANE_TOKENS[a:b], sequence) for a, b in ((0, 1), (1, 2), (2, 20), (20, 29))]
        assert np.array_equal(np.concatenate(pieces), got)
        assert ids(generate(backend, LANE_TOKENS[:4], 24)) == ids(generate(judge, LANE_TOKENS[:4], 24))


def test_a_delay_of_nothing_is_tensor_parallelism_bit_for_bit(tmp_path: Path) -> None:
    """The same tensors as a Llama would be plain ranks; here the lanes of delay 0 agree with full early sums."""
    make_laneformer(tmp_path / "zero", num_lanes=4, broadcast_delay=0)
    make_laneformer(
        tmp_path / "sums", num_lanes=4, broadcast_delay=4, use_early_comm=True
    )  # early to the end
    with cpu(tmp_path / "zero", workers=None) as zero, cpu(tmp_path / "sums", workers=None) as sums:
        assert np.array_equal(logits(zero, LANE_TOKENS), logits(sums, LANE_TOKENS))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["bf16", "q8"])
def test_lanes_in_low_precision(tmp_path: Path, dtype: str) -> None:
    import torch

    model = make_laneformer(tmp_path)
    tokens = torch.tensor([LANE_TOKENS])
    with torch.no_grad():
        exact = model.double()(tokens)[0].numpy()
        if dtype == "q8":
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    rows = parameter.detach().float().reshape(-1, parameter.shape[-1]).numpy()
                    parameter.data = torch.from_numpy(eight_bits(rows)).reshape(parameter.shape).double()
        honest = model.to(torch.bfloat16 if dtype == "bf16" else torch.float64)(tokens)[0].double().numpy()
    with cpu(tmp_path, dtype, None) as backend:
        assert distance(logits(backend, LANE_TOKENS), exact) <= 2 * distance(honest, exact) + ULP


def test_bits_do_not_depend_on_the_workers_of_a_rank(tmp_path: Path) -> None:
    make_laneformer(tmp_path, num_lanes=2)
    results = []
    for workers in (2, 4, 6, 22):
        with cpu(tmp_path, "q8", workers) as backend:
            results.append(logits(backend, LANE_TOKENS))
    assert all(np.array_equal(results[0], other) for other in results[1:])


SCHEDULES = {
    "tensor parallel": {"broadcast_delay": 0, "num_lanes": 2},
    "delay 2": {"num_lanes": 4},
    "delay 4, early sums": {"broadcast_delay": 2, "use_early_comm": True, "num_lanes": 2},
    "ladder": {**in_modules(1), "ladder_residual": True, "num_lanes": 2},
    "silent": {"use_comm": False, "num_lanes": 2},
}


Late = dict[str, tuple[CpuBackend, list[int], np.ndarray]]
#: The longest delay of a word and the seed of all delays.
DELAYS = {"longest_ns": st.sampled_from((0, 300, 3_000, 20_000)), "seed": st.integers(0, 2**64 - 1)}


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Late]:
    """Tiny models with several ranks, and what they say when every word is on time."""
    with ExitStack() as stack:
        opened = {}
        for name, changes in SCHEDULES.items():
            folder = tmp_path_factory.mktemp("late")
            make_laneformer(folder, hidden_size=16, intermediate_size=8, num_hidden_layers=6, **changes)
            backend = stack.enter_context(cpu(folder, workers=2 * 4 if name == "delay 2" else None))
            opened[name] = (backend, ids(generate(backend, PROMPT[:3], 12)), logits(backend, PROMPT[:9]))
        yield opened


@settings(max_examples=20, deadline=None)
@given(**DELAYS)
def test_words_that_come_late_never_change_a_bit(late: Late, longest_ns: int, seed: int) -> None:
    check_late_words(late, longest_ns, seed)


@pytest.mark.long
@settings(max_examples=120, deadline=None)
@given(**DELAYS)
def test_words_that_come_late_never_change_a_bit_in_many_schedules(
    late: Late, longest_ns: int, seed: int
) -> None:
    check_late_words(late, longest_ns, seed)


def check_late_words(late: Late, longest_ns: int, seed: int) -> None:
    """Every word of every send draws its own delay: five settings, two runs each, are ten schedules an example."""
    for backend, tokens, expected in late.values():
        backend.delay_words(longest_ns, seed)
        assert ids(generate(backend, PROMPT[:3], 12)) == tokens
        assert np.array_equal(logits(backend, PROMPT[:9]), expected)


@pytest.mark.parametrize("name", ["tensor parallel", "ladder"])
def test_with_one_slot_fewer_late_words_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The test above can fail: a send that overwrites what a rank still needs leaves that rank waiting."""
    monkeypatch.setattr(cpu_model, "DEADLINE_US", 1_000_000)  # words are late by microseconds
    make_laneformer(tmp_path, hidden_size=16, intermediate_size=8, num_hidden_layers=6, **SCHEDULES[name])
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    plan = compile_plan(spec, Machine("cpu", 1), Format.F32, context=160)
    backend = CpuBackend.load(spec, replace(plan, slots=plan.slots - 1), checkpoint)

    def many_schedules() -> None:
        for seed in range(200):
            backend.delay_words(20_000, seed * 0x9E3779B97F4A7C15 % 2**64)
            generate(backend, PROMPT[:3], 12)

    with pytest.raises(DeadlineFault, match="waited too long for rank"):
        many_schedules()
    backend.close()


@pytest.mark.parametrize("name", ["tensor parallel", "delay 2", "silent"])
@pytest.mark.parametrize("after", [0, 7, 20])
def test_a_rank_that_stops_is_named(tmp_path: Path, name: str, after: int) -> None:
    make_laneformer(tmp_path, **{**SCHEDULES[name], "num_lanes": 4})
    with cpu(tmp_path, workers=None) as backend:
        healthy = ids(generate(backend, LANE_TOKENS[:3], 8))
        for rank in (2, 0):
            backend.stop_rank(rank, after, deadline_us=100_000)
            with pytest.raises(DeadlineFault, match=rf"Rank \d waited too long for rank {rank} in stage \w+"):
                generate(backend, LANE_TOKENS[:3], 8)
        backend.stop_rank(-1)
        assert ids(generate(backend, LANE_TOKENS[:3], 8)) == healthy


def test_ranks_that_wait_for_a_stopped_one_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait has the same deadline here, of ranks and of workers: the waits for rank 2 began first."""
    deadline_us = 3_000_000
    monkeypatch.setattr(cpu_model, "DEADLINE_US", deadline_us)
    make_laneformer(tmp_path, **{**SCHEDULES["silent"], "num_lanes": 4})
    with cpu(tmp_path, workers=None) as backend:
        backend.stop_rank(2, 7, deadline_us)
        with pytest.raises(DeadlineFault, match=r"Rank \d waited too long for rank 2"):
            generate(backend, LANE_TOKENS[:3], 8)


def test_sampling_and_logprobs_are_those_of_the_reference(eight: Maker) -> None:
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=2**63 + 11)
    judge = reference(eight("qwen2"))
    expected = generate(judge, count=20, sampling=sampling, logprobs=3)
    with cpu(eight("qwen2"), workers=None, tp=4) as backend:
        got = generate(backend, count=20, sampling=sampling, logprobs=3)
    assert ids(got) == ids(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_stopping_cancelling_and_a_second_turn(tmp_path: Path) -> None:
    make_laneformer(tmp_path, max_position_embeddings=4000)
    with cpu(tmp_path, workers=None, context=4000) as backend:
        free = ids(generate(backend, LANE_TOKENS[:5], 30))
        place = next(index for index in range(8, 30) if free[index] not in free[:index])
        assert ids(generate(backend, LANE_TOKENS[:5], 30, stop_ids=(free[place],))) == free[: place + 1]
        sequence = backend.new_sequence()
        running = backend.start(Job(LANE_TOKENS[:5], 0, 3000), sequence)
        seen = []
        for token in running:
            seen.append(token.id)
            if len(seen) == 6:
                running.cancel()
        assert running.finish_reason == "cancelled"
        assert 6 <= len(seen) < 3000
        turn = (*LANE_TOKENS[:5], *seen, *LANE_TOKENS[20:])
        warm = ids(list(backend.start(Job(turn, sequence.length, 9), sequence)))
        assert warm == ids(generate(backend, turn, 9))
        before = backend.start(Job(LANE_TOKENS * 100, 0, 5), backend.new_sequence())
        before.cancel()
        assert len(list(before)) <= 1
        assert before.finish_reason == "cancelled"


def test_a_number_that_is_none_is_a_fault_and_not_a_hang(eight: Maker) -> None:
    with cpu(eight("llama"), workers=None, tp=4, context=64) as backend:
        sequence = backend.new_sequence()
        backend.logits(PROMPT[:4], sequence)
        sequence.ranks[2].values[:] = np.nan
        with pytest.raises(NumericalFault, match="position 5"):
            list(backend.start(Job(PROMPT[:5], 4, 3), sequence))
        assert len(generate(backend, count=8)) == 8


def test_ranks_have_memory_of_their_own(eight: Maker) -> None:
    with cpu(eight("llama"), workers=None, tp=8) as backend:
        sequence = backend.new_sequence()
        sequence.reserve(10)
        assert [rank.keys.shape for rank in sequence.ranks] == [(3, 1, 256, 10)] * 8
        assert sequence.bytes == 8 * 2 * 3 * 256 * 10 * 4
        structs = backend._model.structs
        tapes = {struct.tapes for struct in structs}
        assert len(tapes) == 8
        assert len({struct.embedding for struct in structs}) == 1  # read-only for all ranks


def test_closing_while_ranks_are_at_work(tmp_path: Path) -> None:
    make_laneformer(tmp_path)
    for _ in range(6):
        with cpu(tmp_path, workers=8, context=160) as backend:
            backend.start(Job(LANE_TOKENS[:5], 0, 150), backend.new_sequence())


@pytest.mark.slow
def test_a_real_model_says_the_same_on_three_ranks() -> None:
    prompt = tuple(range(40, 70))
    with cpu(smollm2(), "q8", None, 256) as one, cpu(smollm2(), "q8", None, 256, tp=3) as three:
        want = logits(one, prompt).astype(np.float64)
        assert distance(logits(three, prompt), want) < 1e-3  # other sums, the same rounding of weights
        assert ids(generate(three, prompt, 12)) == ids(generate(one, prompt, 12))
