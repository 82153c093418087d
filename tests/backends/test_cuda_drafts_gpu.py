"""Several rows a pass on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_drafts_gpu.py"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.host_drafts import SAMPLINGS, Answer, answer, plain, predicting
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.detection import why_not
from monotape.backends.cuda.driver import processors
from monotape.backends.protocol import Job
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

CONTEXT, VOCAB, ROWS, RUNS = 1024, 4099, 4, 3
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "num_hidden_layers": 4}
CASES = {
    # Most workers own nothing of most stages.
    "narrow": Case("drafts-narrow", "llama", {**SIZES, "head_dim": 32, "hidden_size": 96}),
    "odd": Case("drafts-odd", "qwen3", {**SIZES, "head_dim": 48, "hidden_size": 154, "tie_word_embeddings": True}),
    # The input of `down` is longer than what is kept in shared memory for every row; q, k and v have biases.
    "wide": Case(
        "drafts-wide", "qwen2",
        {
            **SIZES, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "window": Case(
        "drafts-window", "mistral", {**SIZES, "head_dim": 32, "hidden_size": 96, "sliding_window": 200}
    ),
}  # fmt: skip
PROMPT = tuple(np.random.default_rng(5).integers(3, VOCAB, 50).tolist())
TOKENS = 300  # over nine edges of units, and over the window's
WRONG = (0.0, 0.05, 0.25)  # shares of a predicted text that are other tokens


@pytest.fixture(scope="module", params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CASES[request.param], tmp_path_factory.mktemp("drafts"))


def load(folder: Path, rows: int, units: int | None = None) -> CudaBackend:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    tuning = Tuning(rows=rows) if units is None else Tuning(rows=rows, units_per_split=units)
    plan = gpu_plan(spec, processors(), CONTEXT, tuning=tuning)
    return CudaBackend.load(spec, plan, checkpoint)


@pytest.fixture(scope="module")
def single(folder: Path) -> Iterator[CudaBackend]:
    backend = load(folder, 1)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def several(folder: Path) -> Iterator[CudaBackend]:
    backend = load(folder, ROWS)
    yield backend
    backend.close()


def check(backend: CudaBackend, job: Job, expected: Answer) -> None:
    for wrong in WRONG:
        predicted = predicting(job, expected.ids, wrong, VOCAB)
        for _ in range(RUNS):
            got = answer(backend, predicted)
            assert got.told == expected.told, f"{wrong} of the prediction are wrong"
            assert 0 < got.accepted <= got.drafted


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_change_no_token(single: CudaBackend, several: CudaBackend, sampling: str) -> None:
    job = Job(PROMPT, 0, TOKENS, **SAMPLINGS[sampling])
    expected = answer(single, job)
    assert expected.drafted == 0
    without = answer(several, plain(job))
    assert without.told == expected.told and without.drafted == 0
    check(several, job, expected)


def test_a_text_that_repeats_itself_is_drafted_without_a_prediction(
    single: CudaBackend, several: CudaBackend
) -> None:
    job = Job(PROMPT[:9] * 12, 0, TOKENS, logprobs=1)
    expected = answer(single, job)
    for _ in range(RUNS):
        got = answer(several, job)
        assert got.told == expected.told


@pytest.mark.parametrize("start", range(60, 68))
def test_from_any_place_of_a_unit(several: CudaBackend, start: int) -> None:
    job = Job((PROMPT * 2)[:start], 0, 70, logprobs=0)
    check(several, job, answer(several, plain(job)))


def test_ends_in_the_middle_of_a_pass(several: CudaBackend) -> None:
    job = Job(PROMPT, 0, 40, **SAMPLINGS["drawn"])
    whole = answer(several, plain(job))
    for end in range(20, 30):
        got = answer(several, predicting(replace(job, max_tokens=end), whole.ids, 0.0, VOCAB))
        assert got.choices == whole.choices[:end] and got.finish_reason == "length" and got.accepted > 0
        stop = whole.ids[end]
        first = whole.ids.index(stop)
        got = answer(several, predicting(replace(job, stop_ids=(stop,)), whole.ids, 0.0, VOCAB))
        assert got.choices == whole.choices[: first + 1] and got.finish_reason == "stop"


def test_to_the_last_position_of_the_context(several: CudaBackend) -> None:
    job = Job((PROMPT * 25)[: CONTEXT - 100], 0, 100)
    expected = answer(several, plain(job))
    sequence = several.new_sequence()
    got = answer(several, predicting(job, expected.ids, 0.0, VOCAB), sequence)
    assert got.told == expected.told and got.accepted > 0 and sequence.length == CONTEXT - 1


def test_rejected_rows_leave_nothing_in_the_kv(several: CudaBackend) -> None:
    job = Job(PROMPT, 0, 150)
    expected = answer(several, plain(job))
    turns = []
    for first in (plain(job), *(predicting(job, expected.ids, wrong, VOCAB) for wrong in WRONG)):
        sequence = several.new_sequence()
        assert answer(several, first, sequence).ids == expected.ids
        second = Job((*PROMPT, *expected.ids, *PROMPT[:7]), sequence.length, 50, logprobs=5)
        turns.append(answer(several, replace(second, drafts=first.drafts), sequence).told)
    assert all(turn == turns[0] for turn in turns)


@pytest.mark.parametrize("units", [2, 5])
def test_splits_of_several_units(folder: Path, units: int) -> None:
    """A pass of several rows combines the parts of each in other workers than a pass of one."""
    backend = load(folder, ROWS, units)
    try:
        for sampling in ("greedy", "filtered"):
            job = Job(PROMPT, 0, TOKENS, **SAMPLINGS[sampling])
            check(backend, job, answer(backend, plain(job)))
    finally:
        backend.close()
