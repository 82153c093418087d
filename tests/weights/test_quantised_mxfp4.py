"""MXFP4 as gpt-oss stores it, for one matrix and for the matrices of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monotape.errors import CheckpointError, ModelError
from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.folder import QuantisedFolder
from weights.quantised_files import E2M1_VALUES, Floats, Integers, Tensors, mxfp4, quantised_folder
from weights.safetensors_files import write_folder

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def opened(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG) -> QuantisedFolder:
    found = open_checkpoint(quantised_folder(folder, MODULE, tensors, config))
    assert isinstance(found, QuantisedFolder)
    return found


def numbers(codes: Integers, exponents: Any) -> Floats:
    found = np.empty(codes.shape, np.float32)
    for n in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            sign = -1 if codes[n, k] >= 8 else 1
            found[n, k] = sign * E2M1_VALUES[codes[n, k] % 8] * 2.0 ** (int(exponents[n, k // 32]) - 127)
    return found


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_matrices_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: int, blocks: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (rows, 32 * blocks))
    exponents = random.integers(0, 250, (rows, blocks)).astype(np.uint8)
    found = opened(tmp_path_factory.mktemp("mxfp4"), mxfp4(codes, exponents))
    assert found.names == {NAME} and found.shape(NAME) == codes.shape and found.stored_as(NAME) == "mxfp4"
    stored = found.stored_matrix(NAME)
    assert stored is not None and stored.scale_kind == "e8m0" and stored.group == (1, 32)
    start = seed % rows
    np.testing.assert_array_equal(stored.values(start, rows), codes[start:])
    np.testing.assert_array_equal(stored.scales(start, rows), exponents[start:])
    np.testing.assert_array_equal(found.rows(NAME, start, rows), numbers(codes, exponents)[start:])


def test_experts_are_rows_one_after_another(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    codes, exponents = random.integers(0, 16, (6, 64)), random.integers(100, 130, (6, 2)).astype(np.uint8)
    one = mxfp4(codes, exponents)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors: Tensors = {
        f"{name}_blocks": ("U8", one["weight_blocks"][1].reshape(2, 3, 2, 16)),
        f"{name}_scales": ("U8", exponents.reshape(2, 3, 2)),
        f"{name}_bias": ("F32", np.ones((2, 3), np.float32)),
    }
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=CONFIG))
    assert found.names == {name, f"{name}_bias"} and found.shape(name) == (2, 3, 64)
    np.testing.assert_array_equal(found.rows(name, 2, 6), numbers(codes, exponents)[2:])


@pytest.mark.parametrize("kept", [{}, {"modules_to_not_convert": None}])
def test_without_a_list_the_experts_alone_are_quantised(tmp_path: Path, kept: dict[str, Any]) -> None:
    """As transformers saves a fine-tuned gpt-oss: attention, router and embeddings have 16 bits and are not named."""
    random = np.random.default_rng(4)
    codes, exponents = random.integers(0, 16, (6, 64)), random.integers(100, 130, (6, 2)).astype(np.uint8)
    one, layer = mxfp4(codes, exponents), "model.layers.0"
    name, plain = f"{layer}.mlp.experts.down_proj", ("F32", np.ones((4, 8), np.float32))
    kept_plain = {
        f"{module}.weight"
        for module in (
            *(f"{layer}.self_attn.{part}_proj" for part in "qkvo"),
            f"{layer}.mlp.router",
            "model.embed_tokens",
            "lm_head",
        )
    }
    tensors: Tensors = {
        f"{name}_blocks": ("U8", one["weight_blocks"][1].reshape(2, 3, 2, 16)),
        f"{name}_scales": ("U8", exponents.reshape(2, 3, 2)),
        **dict.fromkeys(kept_plain, plain),
    }
    settings = {"quant_method": "mxfp4", **kept}
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=settings))
    assert found.names == {name, *kept_plain}
    assert {found.stored_as(module) for module in kept_plain} == {"f32"}
    np.testing.assert_array_equal(found.rows(name, 0, 6), numbers(codes, exponents))
    expert = f"{layer}.mlp.experts.1.down_proj"
    tensors[f"{expert}.weight"] = plain
    with pytest.raises(CheckpointError, match=f"says that {expert} is quantised, but it is stored as f32"):
        _ = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=settings)).names
    # With a list that is complete, a matrix that it does not name is quantised.
    del tensors[f"{expert}.weight"]
    listed = {**settings, "modules_to_not_convert": ["lm_head"]}
    with pytest.raises(CheckpointError, match=r"says that .*k_proj is quantised, but it is stored as f32"):
        _ = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=listed)).names


GOOD = mxfp4(np.arange(64).reshape(1, 64) % 16, np.full((1, 2), 127, np.uint8))


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"weight_scales": None}, {}, "has no _scales, only _blocks"),
        (
            {"weight": ("F32", np.ones((1, 64), np.float32))},
            {"modules_to_not_convert": []},
            "is quantised, but it is",
        ),
        ({"weight": ("F32", np.ones((1, 64, 1), np.float32))}, {}, "twice, plain and quantised"),
        ({"weight_blocks": None}, {}, "has _scales, but no quantised matrix"),
        ({"weight_scales": ("U8", np.zeros((1, 3), np.uint8))}, {}, "1 x 3, but .* asks for 1 x 2"),
        ({"weight_scales": ("U8", np.array([[127, 255]], np.uint8))}, {}, "a scale of nan in row 0"),
        ({"weight_blocks": ("U8", np.zeros((1, 2, 8), np.uint8))}, {}, "rows by blocks by 16 bytes"),
        ({"weight_blocks": ("I32", np.zeros((1, 2, 16), np.int32))}, {}, "it must be u8"),
        ({}, {"modules_to_not_convert": ["mlp.down_proj"]}, "leaves .*down_proj as it is"),
        ({}, {"block_size": 16}, "block_size = 16, a field that mxfp4 does not know"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, change: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    tensors = {end: tensor for end, tensor in {**GOOD, **change}.items() if tensor is not None}
    with pytest.raises((CheckpointError, ModelError), match=message) as refused:
        opened(tmp_path, tensors, {**CONFIG, **config}).rows(NAME, 0, 1)
    assert refused.value.hint and refused.value.message.count(". ") == 0
