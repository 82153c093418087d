"""GPTQ checkpoints of both versions, with columns in their order and sorted by activation."""

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
    Integers,
    Tensors,
    gptq,
    in_module,
    integers_times_scales,
    quantised_folder,
)
from weights.safetensors_files import write_folder

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 12, "desc_act": False, "sym": False}


def parts(
    rows: int, columns: int, groups: int, bits: int = 4, seed: int = 0
) -> tuple[Integers, Integers, NDArray[np.float16]]:
    random = np.random.default_rng(seed)
    top = 1 << bits
    scales = random.normal(0, 0.02, (rows, groups)).astype(np.float16)
    return random.integers(0, top, (rows, columns)), random.integers(1, top, (rows, groups)), scales


def opened(folder: Path, tensors: Tensors, config: dict[str, Any]) -> QuantisedFolder:
    found = open_checkpoint(quantised_folder(folder, MODULE, tensors, config))
    assert isinstance(found, QuantisedFolder)
    return found


def scattered(columns: int, groups: int, seed: int = 5) -> list[int]:
    """The group of each column where columns were sorted by a real permutation."""
    order = np.random.default_rng(seed).permutation(columns)
    found = np.empty(columns, np.int64)
    found[order] = np.arange(columns) // (columns // groups)
    return [int(group) for group in found]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sorted_columns", [False, True])
@pytest.mark.parametrize("size", [12, -1])
def test_matrices_are_those_that_were_written(
    tmp_path: Path, bits: int, version: int, sorted_columns: bool, size: int
) -> None:
    rows, columns = 24, 72
    groups = 1 if size == -1 else columns // size
    codes, zeros, scales = parts(rows, columns, groups, bits)
    if version == 2:
        zeros[::3] = 0  # what the first version cannot store
    group_of = (
        scattered(columns, groups) if sorted_columns else [k // (columns // groups) for k in range(columns)]
    )
    form = "gptq" if version == 1 else "gptq_v2"
    config = {
        **CONFIG,
        "bits": bits,
        "group_size": size,
        "desc_act": sorted_columns,
        "checkpoint_format": form,
    }
    found = opened(tmp_path, gptq(codes, zeros, scales, group_of, bits, version), config)
    assert found.names == {NAME} and found.shape(NAME) == (rows, columns)
    assert found.stored_as(NAME) == (f"int{bits}-channel" if size == -1 else f"int{bits}-g{size}")
    expected = integers_times_scales(codes, zeros, scales, group_of)
    for start, stop in ((0, rows), (3, 7), (rows - 1, rows), (2, 2)):
        np.testing.assert_array_equal(found.rows(NAME, start, stop), expected[start:stop])


def test_the_order_sorts_columns_by_group(tmp_path: Path) -> None:
    codes, zeros, scales = parts(8, 192, 6)
    group_of = scattered(192, 6)
    found = opened(
        tmp_path, gptq(codes, zeros, scales, group_of), {**CONFIG, "desc_act": True, "group_size": 32}
    )
    stored = found.stored_matrix(NAME)
    assert stored is not None and stored.order is not None
    assert sorted(stored.order.tolist()) == list(range(192)) and stored.order.tolist() != list(range(192))
    assert [group_of[k] for k in stored.order] == [j // 32 for j in range(192)]
    # What a packer would do: sort the columns, then use plain groups.
    values = stored.centred(stored.values(0, 8), stored.zeros(0, 8))[:, stored.order].astype(np.float32)
    product = values * np.repeat(stored.float_scales(0, 8), 32, axis=1)
    np.testing.assert_array_equal(product, stored.dequantised(0, 8)[:, stored.order])
    assert found.integer_rows(NAME, 0, 8) is None


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([4, 8]), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_codes_scales_and_zero_points_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, bits: int, version: int, groups: int, seed: int
) -> None:
    codes, zeros, scales = parts(16, 24 * groups, groups, bits, seed)
    config = {**CONFIG, "bits": bits, "group_size": 24, "format": "gptq" if version == 1 else "gptq_v2"}
    tensors = gptq(codes, zeros, scales, None, bits, version)
    stored = opened(tmp_path_factory.mktemp("gptq"), tensors, config).stored_matrix(NAME)
    assert stored is not None and stored.order is None
    start = seed % 16
    np.testing.assert_array_equal(stored.values(start, 16), codes[start:])
    np.testing.assert_array_equal(stored.zeros(start, 16), zeros[start:])
    np.testing.assert_array_equal(stored.scales(start, 16), scales[start:])


@pytest.mark.parametrize(("bits", "version"), [(4, 1), (4, 2), (8, 1)])
def test_a_symmetric_file_has_no_zero_points(tmp_path: Path, bits: int, version: int) -> None:
    codes, zeros, scales = parts(16, 64, 2, bits)
    zeros[:] = 1 << (bits - 1)
    form = "gptq" if version == 1 else "gptq_v2"
    config = {**CONFIG, "bits": bits, "group_size": 32, "sym": True, "checkpoint_format": form}
    found = opened(tmp_path, gptq(codes, zeros, scales, None, bits, version), config)
    stored = found.stored_matrix(NAME)
    assert stored is not None and stored.symmetric and stored.zeros(0, 16) is None
    group_of = [k // 32 for k in range(64)]
    expected = integers_times_scales(codes, zeros, scales, group_of)
    np.testing.assert_array_equal(found.rows(NAME, 0, 16), expected)
    exact = found.integer_rows(NAME, 0, 16)
    assert exact is not None
    np.testing.assert_array_equal(exact[0] * np.repeat(exact[1].astype(np.float32), 32, axis=1), expected)


#: A section as GPTQModel 7 writes it (its newest names of the method and the format stand beside the old ones).
GPTQMODEL = {
    "bits": 4, "group_size": 12, "desc_act": False, "lm_head": False, "method": "gptq", "quant_method": "gptq",
    "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "sym": False,
    "meta": {
        "quantizer": ["gptqmodel:7.0.0"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
        "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0, "gptaq": None,
        "activation_weighted_mse": False, "act_group_aware": True, "mock_quantization": False,
        "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": {"type": "mad", "k": 2.75}},
        "offload_to_disk": True, "offload_to_disk_path": "./offload/", "pack_impl": "cpu", "gc_mode": "interval",
        "wait_for_submodule_finalizers": False, "auto_forward_data_parallel": True, "dense_vram_strategy": "exclusive",
        "hessian": {"chunk_size": None, "chunk_bytes": None, "staging_dtype": "float32"},
    },
}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "others", [{}, {"pack_impl": "cpu"}, {"gptaq": None, "failsafe": {"strategy": "rtn"}, "mse": 0.0}]
)
def test_a_section_as_gptqmodel_writes_it(tmp_path: Path, version: int, others: dict[str, Any]) -> None:
    """`sym` is that of the file; of the rest only bits, group_size, desc_act and the format decide."""
    codes, zeros, scales = parts(16, 72, 6)
    form = "gptq" if version == 1 else "gptq_v2"
    settings = {**GPTQMODEL, "format": form, "checkpoint_format": form, **others}
    expected = integers_times_scales(codes, zeros, scales, [k // 12 for k in range(72)])
    found = opened(tmp_path, gptq(codes, zeros, scales, None, 4, version), settings)
    np.testing.assert_array_equal(found.rows(NAME, 0, 16), expected)


def test_modules_that_a_list_of_blocks_leaves_out_are_plain(tmp_path: Path) -> None:
    codes, zeros, scales = parts(8, 24, 2)
    tensors = in_module(MODULE, gptq(codes, zeros, scales, None))
    other = "model.layers.0.self_attn.o_proj.weight"
    tensors[other] = ("F32", np.ones((8, 8), np.float32))
    for blocks in (
        ["mlp.down_proj"],
        ["mlp.down_proj", "self_attn.o_proj"],
    ):  # `dynamic` counts beside the list
        config = {**CONFIG, "modules_in_block_to_quantize": [blocks], "dynamic": {"-:.*o_proj": {}}}
        found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=config))
        assert found.names == {NAME, other} and found.stored_as(other) == "f32"


CODES, ZEROS, SCALES = parts(16, 72, 6)
ORDER = scattered(72, 6)
GOOD = gptq(CODES, ZEROS, SCALES, None)
UNEVEN = np.array([0] * 13 + [k // 12 for k in range(13, 72)], np.int32)
BEYOND = np.array(ORDER, np.int32)
BEYOND[4] = 6
LOW = ZEROS.copy()
LOW[3, 2] = 0  # the first version has no way to say it


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"scales": None}, {}, "has no scales, only qweight, qzeros"),
        ({"qzeros": None}, {}, "has no qzeros"),
        ({"scales": ("F16", SCALES.T[:5].copy())}, {}, "5 x 16, but .* asks for 6 x 16"),
        ({"scales": ("F16", np.full((6, 16), np.inf, np.float16))}, {}, "a scale of inf in row 0"),
        ({}, {"desc_act": True}, "has no g_idx"),
        ({"g_idx": ("I32", np.array(ORDER, np.int32))}, {}, "another order, but the config says desc_act = false"),
        ({"g_idx": ("I32", UNEVEN)}, {"desc_act": True}, "puts 13 columns into group 0, but groups have 12"),
        ({"g_idx": ("I32", BEYOND)}, {"desc_act": True}, "groups from 0 to 6, but there are 6"),
        ({"g_idx": ("I32", BEYOND[:9])}, {"desc_act": True}, "asks for 72"),
        ({"qzeros": gptq(CODES, LOW, SCALES, None)["qzeros"]}, {}, "15, which engines read as 0 or as 16"),
        ({}, {"sym": True}, "zero points other than 8, but the config says sym = true"),
        ({}, {"group_size": 16}, "has 72 columns, which groups of 16 do not divide"),
        ({}, {"group_size": 24}, "6 x 16, but .* asks for 3 x 16"),
        ({}, {"bits": 3}, "bits = 3, which is not supported for gptq"),
        ({}, {"bits": 2}, "bits = 2, which is not supported for gptq"),
        ({}, {"bits": None}, "bits"),
        ({}, {"checkpoint_format": "marlin"}, "the format marlin, which is not supported"),
        ({}, {"checkpoint_format": "gptq_v2", "format": "gptq"}, "format says something else"),
        ({}, {"is_marlin_format": True}, "is_marlin_format = true"),
        ({}, {"method": "qqq"}, 'method is "qqq", but quant_method is gptq'),
        ({}, {"format": "bitblas"}, "the format bitblas, which is not supported"),
        ({}, {"rotation": "hadamard"}, 'rotation = "hadamard", which is not supported for gptq'),
        ({}, {"dynamic": {"-:.*down.*": {}}}, "leaves .*down_proj as it is, but it is stored quantised"),
        ({}, {"dynamic": {"+:.*down.*": {"bits": 8}}}, "which gives some modules a quantisation of their own"),
        ({}, {"dynamic": ["-:.*"]}, "dynamic is .* must be an object"),
        ({}, {"pack_dtype": "int16"}, 'pack_dtype = "int16"'),
        ({}, {"modules_in_block_to_quantize": ["mlp"]}, "must be a list of lists of names"),
        ({}, {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "leaves .*down_proj as it is"),
        ({}, {"adapter": {"name": "lora"}}, "adapter = .* a field that gptq does not know"),
        ({}, {"hadamard": 1}, "hadamard = 1, a field that gptq does not know"),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, change: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    tensors = {end: tensor for end, tensor in {**GOOD, **change}.items() if tensor is not None}
    with pytest.raises((CheckpointError, ModelError, UnsupportedModel), match=message) as refused:
        opened(tmp_path, tensors, {**CONFIG, **config}).rows(NAME, 0, 16)
    assert refused.value.hint and refused.value.message.count(". ") == 0
