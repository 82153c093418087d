"""The CPU backend's numbers: close enough to the exact ones, and the same bits however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import PROMPT, cpu, generate, ids, reference
from families import BY_NAME, CASES, Case, make_checkpoint, transformers_model
from monotape.backends.protocol import Job

pytestmark = pytest.mark.slow

Checkpoint = Callable[[str], Path]
Logits = NDArray[np.float64]


def transformers_logits(folder: Path, dtype: Any, *, through_q8: bool = False) -> Logits:
    import torch

    model = transformers_model(folder, dtype)
    if through_q8:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = torch.from_numpy(eight_bits(parameter.detach().float().numpy())).to(dtype)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([PROMPT])).logits[0].double().numpy())


def eight_bits(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to int8 with one f16 scale per 32 values of a row."""
    padded = np.zeros((values.shape[0], -(-values.shape[1] // 32) * 32), np.float32)
    padded[:, : values.shape[1]] = values
    blocks = padded.reshape(values.shape[0], -1, 32)
    scales = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    rounded = np.rint(blocks / np.where(scales > 0, scales, 1)).clip(-127, 127) * scales
    return np.ascontiguousarray(rounded.reshape(padded.shape)[:, : values.shape[1]])


def distance(got: Any, exact: Logits) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed"
)  # torch says so on machines without bf16 instructions
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "q8"])
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_no_worse_than_twice_an_honest_evaluation(checkpoint: Checkpoint, case: str, dtype: str) -> None:
    """Exact: transformers in float64. Honest: transformers in the low precision itself."""
    import torch

    folder = checkpoint(case)
    honest_dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8": torch.float32}[
        dtype
    ]
    exact = transformers_logits(folder, torch.float64)
    honest = transformers_logits(folder, honest_dtype, through_q8=dtype == "q8")
    with cpu(folder, dtype, context=BY_NAME[case].context) as backend:
        got = backend.logits(PROMPT, backend.new_sequence())
    ulp = float(np.finfo(np.float32).eps)
    assert distance(got, exact) <= 2 * distance(honest, exact) + ulp


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_greedy_tokens_are_those_of_the_reference(checkpoint: Checkpoint, case: str) -> None:
    folder, context = checkpoint(case), BY_NAME[case].context
    expected = ids(generate(reference(folder, context), PROMPT[:9], 64))
    with cpu(folder, "f32", context=context) as backend:
        assert ids(generate(backend, PROMPT[:9], 64)) == expected


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_bits_do_not_depend_on_the_number_of_workers(checkpoint: Checkpoint, dtype: str) -> None:
    results = []
    for workers in (1, 2, 3, 7, 40):
        with cpu(checkpoint("qwen3-alternating"), dtype, workers) as backend:
            results.append(backend.logits(PROMPT, backend.new_sequence()))
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2-mixed-windows"])
@pytest.mark.parametrize("dtype", ["f16", "q8"])
def test_bits_do_not_depend_on_how_the_prompt_is_cut(checkpoint: Checkpoint, case: str, dtype: str) -> None:
    """Whole chunks, single tokens and odd pieces: a cached prefix never changes a result."""
    with cpu(checkpoint(case), dtype) as backend:
        whole = backend.logits(PROMPT, backend.new_sequence())
        for cuts in ([1] * len(PROMPT), [3, 1, 40, 31], [74, 1]):
            sequence, start, pieces = backend.new_sequence(), 0, []
            for length in cuts:
                pieces.append(backend.logits(PROMPT[start : start + length], sequence))
                start += length
            assert np.array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("isa", ["", "portable"])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("head_dim", [16, 10])
def test_long_prompts_have_the_bits_of_single_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int, window: int | None, isa: str
) -> None:
    """Several KV blocks and several slices along k: rows that are computed together, and each alone."""
    monkeypatch.setenv("MONOTAPE_ISA", isa)
    fields = {
        "head_dim": head_dim, "sliding_window": window, "max_position_embeddings": 512,
        "intermediate_size": 4200, "num_hidden_layers": 2,
    }  # fmt: skip
    folder = make_checkpoint(Case("long", "mistral", fields, 512), tmp_path)
    prompt = tuple(np.random.default_rng(3).integers(3, 131, 300).tolist())
    with cpu(folder, "q8", context=512) as backend:
        together = backend.logits(prompt, backend.new_sequence())
        sequence = backend.new_sequence()
        alone = np.concatenate([backend.logits(prompt[i : i + 1], sequence) for i in range(len(prompt))])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("length", [2, 64, 65, 70, 75])
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_the_first_token_is_that_of_all_logits(checkpoint: Checkpoint, dtype: str, length: int) -> None:
    """A prompt's pass skips the last layer for rows that nothing reads; later results must not change."""
    with cpu(checkpoint("qwen3"), dtype, workers=3) as backend:
        whole = backend.logits(PROMPT[:length], backend.new_sequence())[-1].astype(np.float64)
        sequence = backend.new_sequence()
        first, second = backend.start(Job(PROMPT[:length], 0, 2, logprobs=0), sequence)
        normaliser = np.log(np.exp(whole - whole.max()).sum()) + whole.max()
        assert first.id == whole.argmax()
        assert first.logprob == pytest.approx(whole.max() - normaliser, abs=1e-5)
        again = backend.start(Job((*PROMPT[:length], first.id), 0, 1, logprobs=0), backend.new_sequence())
        assert [token.id for token in again] == [second.id]
        kept = backend.logits((second.id,), sequence)
        prompt = (*PROMPT[:length], first.id, second.id)
        assert np.array_equal(kept[-1], backend.logits(prompt, backend.new_sequence())[-1])


@pytest.mark.parametrize("exponent", [-90, 100])
def test_eight_bit_activations_of_any_size_are_rounded_alike(tmp_path: Path, exponent: int) -> None:
    """Their scales are powers of two: a power of two more in the values changes nothing but the exponent."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(
        Case("scaled", "llama", {"head_dim": 10, "tie_word_embeddings": False}), tmp_path
    )
    with cpu(folder, "q8") as backend:
        expected = backend.logits(PROMPT[:9], backend.new_sequence())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ldexp(weights["model.norm.weight"], torch.tensor(exponent))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with cpu(folder, "q8") as backend:
        got = backend.logits(PROMPT[:9], backend.new_sequence())
    assert np.array_equal(np.ldexp(got.astype(np.float64), -exponent), expected.astype(np.float64))


def test_bits_do_not_change_between_runs(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("phi3"), "q8", workers=3) as backend:
        first = backend.logits(PROMPT, backend.new_sequence())
        for _ in range(20):
            assert np.array_equal(backend.logits(PROMPT, backend.new_sequence()), first)


@pytest.mark.parametrize("window", [None, 150])
def test_long_contexts_cross_many_kv_blocks(tmp_path: Path, window: int | None) -> None:
    """More positions than one KV block, decoded one by one; the window starts inside a block."""
    fields = {"head_dim": 10, "sliding_window": window, "max_position_embeddings": 512}
    folder = make_checkpoint(Case("long", "mistral", fields, 512), tmp_path)
    prompt = tuple(np.random.default_rng(3).integers(3, 131, 400).tolist())
    expected = reference(folder, 512)
    want = expected.logits(prompt, expected.new_sequence())
    with cpu(folder, "f32", workers=3, context=512) as backend:
        sequence = backend.new_sequence()
        backend.logits(prompt[:390], sequence)
        got = np.concatenate([backend.logits(prompt[i : i + 1], sequence) for i in range(390, 400)])
    assert distance(got, want[390:].astype(np.float64)) < 1e-5


@pytest.mark.parametrize("isa", ["portable"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "q8"])
def test_portable_kernels_agree_with_the_fast_ones(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, isa: str, dtype: str
) -> None:
    with cpu(checkpoint("qwen3"), dtype) as backend:
        fast = backend.logits(PROMPT, backend.new_sequence())
    monkeypatch.setenv("MONOTAPE_ISA", isa)
    with cpu(checkpoint("qwen3"), dtype) as backend:
        assert backend.isa == isa
        portable = backend.logits(PROMPT, backend.new_sequence())
    assert distance(portable, fast.astype(np.float64)) < (2e-6 if dtype == "f32" else 2e-3)
