"""KV in 8 bits on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_narrow_kv_gpu.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import distance, ids, reference
from backends.narrow_kv import continued, stored
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.detection import why_not
from monotape.backends.cuda.driver import processors
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.protocol import Job
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.open import open_checkpoint
from monotape.weights.rounding import fp8_heads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
]

CONTEXT = 512
LONG = {"max_position_embeddings": 600}
CASES = {
    case.name: case
    for case in (
        Case("odd", "llama", {"head_dim": 48, "hidden_size": 54, **LONG}),
        Case("qk-norm", "qwen3", {"head_dim": 32, "hidden_size": 66, "tie_word_embeddings": True, **LONG}),
        Case("window", "mistral", {"head_dim": 64, "sliding_window": 100, **LONG}),
        Case("wide", "llama", {"head_dim": 128, **LONG}),
    )
}
FAR = {Format.BF16: 0.04, Format.F16: 0.01}  # of the logits' norm
TOKENS = tuple(np.random.default_rng(5).integers(3, 131, 400).tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    for name, case in CASES.items():
        make_checkpoint(case, folder / name)
    return folder


def load(folder: Path, fmt: Format, kv: Format | None, rows: int = 1) -> CudaBackend:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    plan = gpu_plan(spec, processors(), CONTEXT, fmt, tuning=Tuning(rows=rows), kv_format=kv)
    return CudaBackend.load(spec, plan, checkpoint)


@pytest.mark.parametrize("fmt", FAR)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [None, 0], ids=["rows", "token by token"])
def test_it_is_stored_and_read_as_the_reference_does(
    place: Path, name: str, fmt: Format, chunk: int | None
) -> None:
    wide, narrow = load(place / name, fmt, None), load(place / name, fmt, Format.FP8)
    kept = []
    for backend in (wide, narrow):
        sequence = backend.new_sequence()
        backend.logits(TOKENS[:300], sequence, chunk=chunk)
        kept.append(stored(backend, sequence, 0, 300))
    for before, after in zip(*kept, strict=True):
        assert np.array_equal(after, fp8_heads(before))
    layers = [stored(narrow, sequence, layer, 300) for layer in range(narrow.gpu_rank.kv.layers)]
    seen = narrow.logits(TOKENS[300:310], sequence, chunk=chunk)
    want = reference(place / name, CONTEXT, kv_dtype="fp8")
    assert distance(seen, continued(want, layers, 300, TOKENS[300:310])) < FAR[fmt]


def test_drafts_change_no_token(place: Path) -> None:
    backend = load(place / "wide", Format.BF16, Format.FP8, rows=4)
    job = Job(TOKENS[:40], 0, 200, drafts=False)
    plain = list(CudaGeneration(backend, job, backend.new_sequence()))
    guessed = Job(TOKENS[:40], 0, 200, prediction=(*TOKENS[38:40], *ids(plain)))
    drafted = list(CudaGeneration(backend, guessed, backend.new_sequence()))
    assert ids(drafted) == ids(plain)
