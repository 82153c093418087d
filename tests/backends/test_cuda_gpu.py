"""The monokernel on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_gpu.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import reference
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.driver import device, processors
from monotape.backends.protocol import Job
from monotape.engine.loading import gpu_plan
from monotape.errors import BackendUnavailable, DeadlineFault
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint


def _gpu_missing() -> str:
    try:
        device()
    except BackendUnavailable as error:
        return error.message
    return ""


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(_gpu_missing()), reason=_gpu_missing() or "a GPU is there"),
]

LONG = {"max_position_embeddings": 600}
CASES = [
    Case("tied", "llama", {"head_dim": 16, "hidden_size": 96, "tie_word_embeddings": True, **LONG}),
    Case("untied", "llama", {"head_dim": 8, "hidden_size": 54, **LONG}),
    Case("qk-norm", "qwen3", {"head_dim": 32, "hidden_size": 66, "tie_word_embeddings": True, **LONG}),
    Case("bias", "qwen2", {"hidden_size": 96, **LONG}),
    Case("window", "mistral", {"head_dim": 64, "sliding_window": 100, **LONG}),
]
TOKENS = np.random.default_rng(5).integers(3, 131, 300).tolist()  # several splits of the context


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(request.param, tmp_path)


def load(folder: Path, workers: int | None = None) -> CudaBackend:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    return CudaBackend.load(spec, gpu_plan(spec, workers or processors(), 512), checkpoint)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def honest_bf16(folder: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float().numpy()


def test_no_worse_than_twice_an_honest_evaluation(folder: Path) -> None:
    want = reference(folder, 512)
    exact = want.logits(TOKENS, want.new_sequence())
    backend = load(folder)
    got = backend.logits(TOKENS, backend.new_sequence())
    assert distance(got, exact) <= 2 * distance(honest_bf16(folder), exact)


def test_bits_repeat_and_greedy_tokens_do_not_depend_on_the_workers(folder: Path) -> None:
    runs = []
    for workers in (2, 7, 61, None):
        backend = load(folder, workers)
        first, again = (backend.logits(TOKENS, backend.new_sequence()) for _ in range(2))
        assert np.array_equal(first, again)
        runs.append(
            [token.id for token in backend.start(Job(tuple(TOKENS[:9]), 0, 60), backend.new_sequence())]
        )
    assert all(run == runs[0] for run in runs)


def test_one_launch_a_request(tmp_path: Path) -> None:
    backend = load(make_checkpoint(CASES[0], tmp_path))
    sequence = backend.new_sequence()
    for turn in range(3):
        generation = backend.start(Job(tuple(TOKENS[: 9 + 40 * turn]), sequence.length, 30), sequence)
        assert len(list(generation)) == 30
        assert generation.finish_reason == "length"
        sequence.truncate(9)
        assert backend.kernel.launches == turn + 1


def test_a_missing_word_hits_its_deadline_and_names_itself(tmp_path: Path) -> None:
    """A worker that publishes nothing in one stage: the others end, name a wait, and leave the process usable."""
    folder = make_checkpoint(CASES[0], tmp_path)
    backend, good = load(folder), load(folder)
    backend._params.deadline_ns = 200_000_000
    backend.lose_word_of("gate_up")
    with pytest.raises(DeadlineFault, match=r"waited too long for word \d+ of stage \w+ in layer [01]\."):
        list(backend.start(Job(tuple(TOKENS[:5]), 0, 5), backend.new_sequence()))
    assert len(list(good.start(Job(tuple(TOKENS[:5]), 0, 5), good.new_sequence()))) == 5
