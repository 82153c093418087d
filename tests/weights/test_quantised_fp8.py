"""FP8 checkpoints: scales of blocks, of which the last ones are cut off, and of whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from monotape.errors import CheckpointError, ModelError, UnsupportedModel
from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.folder import QuantisedFolder
from weights.quantised_files import (
    Tensors,
    e4m3_numbers,
    finite_e4m3,
    fp8_blocks,
    in_module,
    quantised_folder,
)
from weights.safetensors_files import to_bf16, write_folder

MODULE = "model.layers.0.self_attn.o_proj"
NAME = f"{MODULE}.weight"
BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def matrix(rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    return finite_e4m3(np.random.default_rng(seed), (rows, columns))


def block_scales(rows: int, columns: int, seed: int = 1) -> NDArray[np.float32]:
    shape = (-(-rows // 128), -(-columns // 128))
    return np.random.default_rng(seed).uniform(0.001, 0.1, shape).astype(np.float32)


def opened(folder: Path, tensors: Tensors, config: dict[str, Any]) -> QuantisedFolder:
    found = open_checkpoint(quantised_folder(folder, MODULE, tensors, config))
    assert isinstance(found, QuantisedFolder)
    return found


@pytest.mark.parametrize(("rows", "columns"), [(130, 300), (128, 128), (7, 129), (257, 5)])
def test_blocks_of_128_by_128(tmp_path: Path, rows: int, columns: int) -> None:
    codes, scales = matrix(rows, columns), block_scales(rows, columns)
    found = opened(tmp_path, fp8_blocks(codes, scales), BLOCK)
    assert found.names == {NAME} and found.shape(NAME) == (rows, columns)
    assert found.stored_as(NAME) == ("fp8-tensor" if (rows, columns) == (128, 128) else "fp8-block")
    expected, numbers = np.empty((rows, columns), np.float32), e4m3_numbers(codes)
    for n in range(rows):
        for k in range(columns):
            expected[n, k] = numbers[n, k] * scales[n // 128, k // 128]
    np.testing.assert_array_equal(found.rows(NAME, 0, rows), expected)
    for start, stop in ((0, 0), (1, 3), (rows // 2, rows)):
        np.testing.assert_array_equal(found.rows(NAME, start, stop), expected[start:stop])


def test_the_stored_parts_of_a_block_matrix(tmp_path: Path) -> None:
    codes, scales = matrix(130, 300), block_scales(130, 300)
    stored = opened(tmp_path, fp8_blocks(codes, scales), BLOCK).stored_matrix(NAME)
    assert stored is not None
    assert (stored.rows, stored.columns, stored.groups, stored.group) == (130, 300, 3, (128, 128))
    assert stored.kind.value == "e4m3" and stored.scale_kind == "f32" and stored.order is None
    np.testing.assert_array_equal(stored.values(126, 130), codes[126:130])
    np.testing.assert_array_equal(stored.scales(126, 130), scales[[0, 0, 1, 1]])
    assert stored.zeros(0, 130) is None and stored.symmetric


@pytest.mark.parametrize("dtype", ["BF16", "F8_E8M0"])
def test_scales_of_other_dtypes_are_kept(tmp_path: Path, dtype: str) -> None:
    codes = matrix(130, 140)
    exponents = np.array([[120, 121], [119, 127]], np.uint8)
    numbers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    scales = exponents if dtype == "F8_E8M0" else to_bf16(numbers)
    tensors = {"weight": ("F8_E4M3", codes), "weight_scale_inv": (dtype, scales)}
    stored = opened(tmp_path, tensors, {**BLOCK, "scale_fmt": "ue8m0"}).stored_matrix(NAME)
    assert stored is not None and stored.scale_kind == ("e8m0" if dtype == "F8_E8M0" else "bf16")
    spread = np.repeat(np.repeat(numbers, 128, 0), 128, 1)[:130, :140]
    np.testing.assert_array_equal(stored.dequantised(0, 130), e4m3_numbers(codes) * spread)


@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_a_tensor(tmp_path: Path, end: str, shape: tuple[int, ...]) -> None:
    codes, scale = matrix(13, 37), np.full(shape, 0.031, np.float32)
    tensors: Tensors = {
        "weight": ("F8_E4M3", codes),
        end: ("F32", scale),
        "input_scale": ("F32", np.float32([0.5])),
    }
    found = opened(tmp_path, tensors, TENSOR)
    assert found.stored_as(NAME) == "fp8-tensor" and found.names == {NAME}
    np.testing.assert_array_equal(found.rows(NAME, 3, 13), e4m3_numbers(codes[3:]) * np.float32(0.031))
    assert any("activations keep 16 bits" in note for note in found.config["_monotape_notes_quantised"])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 11), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_any_shape_of_blocks(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, height: int, width: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    codes = finite_e4m3(random, (rows, columns))
    scales = random.uniform(0, 2, (-(-rows // height), -(-columns // width))).astype(np.float32)
    config = {**BLOCK, "weight_block_size": [height, width]}
    stored = opened(tmp_path_factory.mktemp("fp8"), fp8_blocks(codes, scales), config).stored_matrix(NAME)
    assert stored is not None
    np.testing.assert_array_equal(stored.values(0, rows), codes)
    for n in range(rows):
        np.testing.assert_array_equal(stored.scales(n, n + 1)[0], scales[n // height])


def test_modules_that_stay_as_they_are(tmp_path: Path) -> None:
    plain = np.ones((4, 6), np.float32)
    tensors = in_module(MODULE, fp8_blocks(matrix(5, 6), block_scales(5, 6)))
    tensors["model.layers.1.mlp.down_proj.weight"] = ("F32", plain)
    tensors["lm_head.weight"] = ("F32", plain)
    tensors["model.embed_tokens.weight"] = ("F32", plain)
    config = {**BLOCK, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=config))
    assert found.stored_as("model.layers.1.mlp.down_proj.weight") == "f32"
    np.testing.assert_array_equal(found.rows("lm_head.weight", 0, 4), plain)
    assert "quantization_config" not in found.config


GOOD = fp8_blocks(matrix(130, 300), block_scales(130, 300))
NAN = matrix(130, 300)
NAN[129, 7] = 0xFF


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"weight_scale_inv": None}, BLOCK, "has no weight_scale_inv, only weight"),
        ({"weight_scale_inv": ("F32", np.ones((2, 2), np.float32))}, BLOCK, "2 x 2, but .*asks for 2 x 3"),
        ({"weight_scale_inv": ("I32", np.ones((2, 3), np.int32))}, BLOCK, "it must be f32 or f16"),
        ({"weight_scale": ("F32", np.ones(1, np.float32))}, BLOCK, "has weight_scale, but"),
        ({"weight": ("F8_E5M2", matrix(130, 300))}, BLOCK, "has weight_scale_inv, but no quantised matrix"),
        ({"weight": ("BF16", np.ones((130, 300), np.uint16))}, BLOCK, "has weight_scale_inv, but no quantised"),
        ({"weight_scale_inv": ("F32", np.ones((2, 3), np.float32))}, TENSOR, "must hold a single number"),
        ({"input_scale": ("F32", np.float32([-1]))}, BLOCK, "holds -1.0, which is no positive number"),
        ({"weight_scale_inv": ("F32", np.full((2, 3), -0.1, np.float32))}, BLOCK, "a scale of -0.1.* in row 0"),
        ({"weight_scale_inv": ("F32", np.full((2, 3), np.inf, np.float32))}, BLOCK, "a scale of inf in row 0"),
        ({"weight": ("F8_E4M3", NAN)}, BLOCK, "holds a NaN in row 129"),
        ({}, {**BLOCK, "modules_to_not_convert": ["o_proj"]}, "leaves .*o_proj as it is, but it is stored quant"),
        ({}, {**BLOCK, "modules_to_not_convert": "o_proj"}, "must be a list of strings"),
        ({}, {**BLOCK, "fmt": "e5m2"}, 'fmt = "e5m2", which is not supported'),
        ({}, {**BLOCK, "activation_scheme": "none"}, 'activation_scheme = "none"'),
        ({}, {**BLOCK, "weight_block_size": [128]}, "must be two numbers"),
        ({}, {**BLOCK, "weight_block_size": [0, 128]}, "must be a list of integers from 1"),
        ({}, {**BLOCK, "expert_dtype": "fp4"}, 'expert_dtype = "fp4"'),
        ({}, {**BLOCK, "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
        ({}, {**BLOCK, "rotate": True}, "rotate = true, a field that fp8 does not know"),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, change: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    tensors = {end: tensor for end, tensor in {**GOOD, **change}.items() if tensor is not None}
    with pytest.raises((CheckpointError, ModelError, UnsupportedModel), match=message) as refused:
        opened(tmp_path, tensors, config).rows(NAME, 0, 130)
    assert refused.value.hint and refused.value.message.count(". ") == 0


def test_a_plain_matrix_that_should_be_quantised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says that .*o_proj is quantised, but it is stored as f32"):
        _ = opened(tmp_path, {"weight": ("F32", np.ones((3, 4), np.float32))}, BLOCK).names


def test_scales_of_the_kv_cache_are_checked_and_not_read(tmp_path: Path) -> None:
    tensors = in_module(MODULE, fp8_blocks(matrix(5, 6), block_scales(5, 6)))
    tensors["model.layers.0.self_attn.k_scale"] = ("F32", np.float32(0.5).reshape(()))
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=BLOCK))
    assert found.names == {NAME}
    notes = found.config["_monotape_notes_quantised"]
    assert "stored quantised, as fp8" in notes[0] and "scales of the KV cache are not used" in notes[1]
    tensors["model.layers.0.self_attn.v_scale"] = ("F32", np.float32([np.nan]))
    damaged = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=BLOCK))
    with pytest.raises(CheckpointError, match="v_scale holds nan"):
        _ = damaged.names
