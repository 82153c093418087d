"""Experts on the CPU: the numbers of transformers and of the reference, whatever the router chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import PROMPT, cpu, distance, generate, ids, reference
from backends.test_cpu_numbers import transformers_logits
from families import EXPERT_CASES, Case, make_checkpoint
from monotape.backends.cpu.backend import CpuBackend

Checkpoints = Callable[[str], Path]
Floats = NDArray[np.float32]
NAMES = [case.name for case in EXPERT_CASES]


def middle(got: Any, exact: Any) -> float:
    """Of the rows the middle one: where two experts nearly tie, any precision may take either."""
    return float(np.median([distance(*rows) for rows in zip(np.asarray(got), exact, strict=True)]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "q8"])
@pytest.mark.parametrize("name", NAMES)
def test_no_worse_than_twice_an_honest_evaluation(checkpoint: Checkpoints, name: str, dtype: str) -> None:
    """Exact: transformers in float64. Honest: transformers in the low precision itself."""
    import torch

    low = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8": torch.bfloat16}[dtype]
    folder = checkpoint(name)
    exact = transformers_logits(folder, torch.float64)
    honest = transformers_logits(folder, low)
    with cpu(folder, dtype) as backend:
        got = backend.logits(PROMPT, backend.new_sequence())
    assert middle(got, exact) <= 2 * middle(honest, exact) + float(np.finfo(np.float32).eps)
    if dtype == "f32":
        assert distance(got, exact) <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_reference(checkpoint: Checkpoints, name: str) -> None:
    expected = ids(generate(reference(checkpoint(name)), PROMPT[:9], 64))
    with cpu(checkpoint(name), "f32") as backend:
        assert ids(generate(backend, PROMPT[:9], 64)) == expected


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_bits_depend_on_neither_workers_nor_cuts(checkpoint: Checkpoints, name: str, dtype: str) -> None:
    results = []
    for workers, cuts in ((1, [75]), (2, [1] * 75), (3, [3, 1, 40, 31]), (7, [74, 1])):
        with cpu(checkpoint(name), dtype, workers) as backend:
            results.append(in_pieces(backend, cuts))
    assert all(np.array_equal(results[0], other) for other in results[1:])


def in_pieces(backend: CpuBackend, cuts: list[int]) -> Floats:
    sequence, start, pieces = backend.new_sequence(), 0, []
    for length in cuts:
        pieces.append(backend.logits(PROMPT[start : start + length], sequence))
        start += length
    return np.concatenate(pieces)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe-plain-softmax"])
def test_ranks_share_the_columns_of_experts(checkpoint: Checkpoints, name: str) -> None:
    slow = reference(checkpoint(name), tp=2)
    want = slow.logits(PROMPT, slow.new_sequence())
    with cpu(checkpoint(name), "f32", 4, tp=2) as backend:
        assert distance(backend.logits(PROMPT, backend.new_sequence()), want) <= 1e-4
        assert ids(generate(backend, PROMPT[:9], 20)) == ids(generate(slow, PROMPT[:9], 20))


def tied(folder: Path, experts: int) -> Path:
    """The same model with routers whose first experts are all alike, and better than the others."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("mlp.router.weight"):
            tensor[:] = 0
        if name.endswith("mlp.router.bias"):
            tensor[:] = -1
            tensor[2 : 2 + experts] = 3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_tie_goes_to_the_lower_experts_and_no_other_is_read(tmp_path: Path) -> None:
    """Seven experts tie for four places. All tokens choose the same ones; the others hold no numbers at all."""
    case = next(case for case in EXPERT_CASES if case.name == "gpt-oss")
    folder = tied(make_checkpoint(Case("tied", case.family, case.fields), tmp_path), 7)
    slow = reference(folder)
    want = slow.logits(PROMPT, slow.new_sequence())
    with cpu(folder, "f32", 3) as backend:
        library = backend.plan.ranks[0].library
        assert library is not None and (library.experts, library.chosen) == (11, 4)
        stored = next(
            array for array in backend._model.kept if getattr(array, "nbytes", 0) == library.bytes
        ).reshape(library.layers, library.experts, library.expert_bytes)
        whole = backend.logits(PROMPT, backend.new_sequence())
        tokens = ids(generate(backend, PROMPT[:9], 12))
        for expert in (0, 1, 6, 7, 8, 9, 10):
            stored[:, expert] = 0xFF  # NaN
        assert np.array_equal(backend.logits(PROMPT, backend.new_sequence()), whole)
        assert ids(generate(backend, PROMPT[:9], 12)) == tokens
        stored[:, 2] = 0xFF
        with pytest.raises(Exception, match="not numbers"):
            generate(backend, PROMPT[:9], 2)
    assert distance(whole, want) <= 1e-4


@pytest.mark.parametrize("isa", ["portable"])
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_portable_kernels_agree_with_the_fast_ones(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, isa: str, dtype: str
) -> None:
    with cpu(checkpoint("gpt-oss"), dtype) as backend:
        fast = backend.logits(PROMPT, backend.new_sequence())
    monkeypatch.setenv("MONOTAPE_ISA", isa)
    with cpu(checkpoint("gpt-oss"), dtype) as backend:
        portable = backend.logits(PROMPT, backend.new_sequence())
    assert middle(portable, fast) < (2e-6 if dtype == "f32" else 2e-3)


def test_a_prompt_of_several_chunks_has_the_bits_of_single_tokens(tmp_path: Path) -> None:
    """Chunks of 160 rows; windows of 150 that cross KV blocks, and sinks."""
    case = next(case for case in EXPERT_CASES if case.name == "gpt-oss")
    fields = {**case.fields, "max_position_embeddings": 512, "sliding_window": 150, "num_hidden_layers": 2}
    folder = make_checkpoint(Case("long", "gpt_oss", fields, 512), tmp_path)
    prompt = tuple(np.random.default_rng(3).integers(3, 131, 400).tolist())
    with cpu(folder, "f32", context=512) as backend:
        assert backend.plan.chunk < 400
        together = backend.logits(prompt, backend.new_sequence())
        sequence = backend.new_sequence()
        backend.logits(prompt[:390], sequence)
        alone = np.concatenate([backend.logits(prompt[i : i + 1], sequence) for i in range(390, 400)])
    slow = reference(folder, 512)
    assert np.array_equal(together[390:], alone)
    assert distance(together, slow.logits(prompt, slow.new_sequence())) <= 1e-4
