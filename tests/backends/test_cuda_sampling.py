"""Sampling on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_sampling.py

The logits of every step are asked for again, by the path of decoding, and the reference chooses from them: with the
same bits it must choose the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.test_cuda_gpu import load
from backends.test_cuda_gpu import pytestmark as pytestmark
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.protocol import Job, Sampling, Token
from monotape.backends.reference.sampler import choose, logprobs

PROMPT = tuple(np.random.default_rng(5).integers(3, 1003, 37).tolist())
TOKENS = 50
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k and top-p": {"top_k": 50, "top_p": 0.95},
    "top-p": {"top_p": 0.9},
    "top-p of nearly all": {"top_p": 0.999, "temperature": 3.0},
    "top-k of more than are gathered": {"top_k": 400, "top_p": 0.99},
    "min-p": {"min_p": 0.1, "top_k": 20},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2, "top_p": 0.8},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((17, 2.0), (1002, 3.0), (4, -1.0)), "top_k": 9},
}


@pytest.fixture(params=(132, 7), ids=lambda workers: f"{workers} workers")
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> CudaBackend:
    large = {"head_dim": 16, "hidden_size": 96, "vocab_size": 1003, "max_position_embeddings": 600}
    return load(make_checkpoint(Case("large vocabulary", "llama", large), tmp_path), request.param)


def generated(backend: CudaBackend, job: Job) -> list[Token]:
    return list(CudaGeneration(backend, job, backend.new_sequence(), chunk=0))


def rows_of(backend: CudaBackend, job: Job, ids: list[int]) -> np.ndarray:
    """The logits that every token was chosen from."""
    return backend.logits([*job.prompt, *ids[:-1]], backend.new_sequence(), chunk=0)[len(job.prompt) - 1 :]


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_chooses_what_the_reference_chooses(backend: CudaBackend, setting: str) -> None:
    sampling = Sampling(**{"temperature": 0.8, "seed": 0xFEDCBA9876543210, **SETTINGS[setting]})
    job = Job(PROMPT, 0, TOKENS, stop_ids=(5, 900), min_tokens=TOKENS, sampling=sampling)
    ids = [token.id for token in generated(backend, job)]
    assert len(ids) == TOKENS
    for step, row in enumerate(rows_of(backend, job, ids)):
        assert ids[step] == choose(row, PROMPT, ids[:step], len(PROMPT) + step, sampling, job.stop_ids), step


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities(backend: CudaBackend, temperature: float, count: int) -> None:
    job = Job(PROMPT, 0, 20, sampling=Sampling(temperature=temperature, top_k=30), logprobs=count)
    tokens = generated(backend, job)
    rows = rows_of(backend, job, [token.id for token in tokens])
    for token, row in zip(tokens, rows, strict=True):
        value, top = logprobs(row, token.id, count)
        assert token.logprob == pytest.approx(value, rel=2**-22)
        assert [name for name, _ in token.top_logprobs] == [name for name, _ in top]
        np.testing.assert_allclose([v for _, v in token.top_logprobs], [v for _, v in top], rtol=2**-22)


def test_a_seed_gives_the_same_tokens_and_another_seed_others(backend: CudaBackend) -> None:
    def ids(seed: int) -> list[int]:
        job = Job(PROMPT, 0, TOKENS, sampling=Sampling(temperature=1.0, top_p=0.95, top_k=50, seed=seed))
        return [token.id for token in generated(backend, job)]

    assert ids(1) == ids(1) != ids(2)
