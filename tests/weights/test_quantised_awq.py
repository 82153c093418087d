"""AWQ checkpoints of version gemm, written to the documented layout one element at a time."""

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
from weights.quantised_files import Integers, Tensors, awq, integers_times_scales, quantised_folder

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 12, "zero_point": True, "version": "gemm"}


def parts(
    rows: int, columns: int, groups: int, seed: int = 0
) -> tuple[Integers, Integers, NDArray[np.float16]]:
    random = np.random.default_rng(seed)
    scales = random.normal(0, 0.02, (rows, groups)).astype(np.float16)  # some tools write negative ones
    return random.integers(0, 16, (rows, columns)), random.integers(0, 16, (rows, groups)), scales


def opened(folder: Path, tensors: Tensors, config: dict[str, Any]) -> QuantisedFolder:
    found = open_checkpoint(quantised_folder(folder, MODULE, tensors, config))
    assert isinstance(found, QuantisedFolder)
    return found


@pytest.mark.parametrize(("rows", "columns", "size"), [(24, 36, 12), (8, 5, -1), (40, 64, 32)])
@pytest.mark.parametrize("zero_point", [True, False])
def test_matrices_are_those_that_were_written(
    tmp_path: Path, rows: int, columns: int, size: int, zero_point: bool
) -> None:
    groups = 1 if size == -1 else columns // size
    codes, zeros, scales = parts(rows, columns, groups)
    config = {**CONFIG, "group_size": size, "zero_point": zero_point}
    found = opened(tmp_path, awq(codes, zeros if zero_point else None, scales), config)
    assert found.names == {NAME} and found.shape(NAME) == (rows, columns)
    assert found.stored_as(NAME) == ("int4-channel" if size == -1 else f"int4-g{size}")
    group_of = [k // (columns // groups) for k in range(columns)]
    expected = integers_times_scales(codes, zeros if zero_point else None, scales, group_of)
    for start, stop in ((0, rows), (3, 7), (rows - 1, rows), (2, 2)):
        np.testing.assert_array_equal(found.rows(NAME, start, stop), expected[start:stop])


def test_a_symmetric_file_may_store_its_zero_points(tmp_path: Path) -> None:
    """As AutoRound writes it: zero_point = false, and 8 for every group."""
    codes, _, scales = parts(24, 36, 3)
    found = opened(tmp_path, awq(codes, np.full((24, 3), 8), scales), {**CONFIG, "zero_point": False})
    stored = found.stored_matrix(NAME)
    assert stored is not None and stored.symmetric and stored.zeros(0, 24) is None
    expected = integers_times_scales(codes, None, scales, [k // 12 for k in range(36)])
    np.testing.assert_array_equal(found.rows(NAME, 3, 17), expected[3:17])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_codes_scales_and_zero_points_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, words: int, groups: int, size: int, seed: int
) -> None:
    rows, columns = 8 * words, groups * size
    codes, zeros, scales = parts(rows, columns, groups, seed)
    folder = tmp_path_factory.mktemp("awq")
    stored = opened(folder, awq(codes, zeros, scales), {**CONFIG, "group_size": size}).stored_matrix(NAME)
    assert stored is not None and not stored.symmetric and stored.scale_kind == "f16"
    start = seed % rows
    np.testing.assert_array_equal(stored.values(start, rows), codes[start:])
    np.testing.assert_array_equal(stored.zeros(start, rows), zeros[start:])
    np.testing.assert_array_equal(stored.scales(start, rows), scales[start:])


@pytest.mark.parametrize("version", ["GEMM", "gemm", None])
def test_capitals_of_the_version_do_not_matter(tmp_path: Path, version: str | None) -> None:
    codes, zeros, scales = parts(8, 12, 1)
    assert opened(tmp_path, awq(codes, zeros, scales), {**CONFIG, "version": version}).names == {NAME}


def test_integers_of_groups_of_32_are_exact_in_the_cpu_format(tmp_path: Path) -> None:
    codes, zeros, scales = parts(16, 128, 2)
    found = opened(tmp_path, awq(codes, zeros, scales), {**CONFIG, "group_size": 64})
    exact = found.integer_rows(NAME, 3, 9)
    assert exact is not None
    integers, halves = exact
    assert integers.dtype == np.int8 and halves.dtype == np.float16 and halves.shape == (6, 4)
    product = integers.astype(np.float32) * np.repeat(halves.astype(np.float32), 32, axis=1)
    np.testing.assert_array_equal(product, found.rows(NAME, 3, 9))


def test_groups_that_are_no_multiple_of_32_have_no_exact_8_bit_form(tmp_path: Path) -> None:
    codes, zeros, scales = parts(8, 48, 4)
    assert opened(tmp_path, awq(codes, zeros, scales), CONFIG).integer_rows(NAME, 0, 8) is None


CODES, ZEROS, SCALES = parts(16, 36, 3)
GOOD = awq(CODES, ZEROS, SCALES)
BAD_SCALE = SCALES.T.copy()
BAD_SCALE[1, 5] = np.nan


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"scales": None}, {}, "has no scales, only qweight, qzeros"),
        ({"qzeros": None}, {}, "has no qzeros, only qweight, scales"),
        ({}, {"zero_point": False}, "has zero points other than 8, but the config says zero_point = false"),
        ({"scales": ("F16", SCALES.T[:2].copy())}, {}, "2 x 16, but .* asks for 3 x 16"),
        ({"qzeros": ("I32", np.zeros((3, 3), np.int32))}, {}, "3 x 3, but .* asks for 3 x 2"),
        ({"scales": ("F16", BAD_SCALE)}, {}, "a scale of nan in row 5"),
        ({"qweight": ("I16", np.zeros((36, 2), np.int16))}, {}, "it must be i32"),
        ({"qweight": ("I32", np.zeros(36, np.int32))}, {}, "it must have 2 dimensions"),
        ({"qweight": ("I32", np.zeros((0, 2), np.int32))}, {}, "must not be empty"),
        ({"weight": ("F16", np.zeros((16, 36), np.float16))}, {}, "has weight, which its quantisation does not use"),
        ({}, {"group_size": 16}, "has 36 columns, which groups of 16 do not divide"),
        ({}, {"group_size": 0}, "group_size is 0, but must be positive"),
        ({}, {"bits": 3}, "bits = 3, which is not supported for awq"),
        ({}, {"bits": 8}, "bits = 8, which is not supported for awq"),
        ({}, {"version": "gemv"}, 'version = "gemv", a layout that is not supported'),
        ({}, {"backend": "llm-awq"}, "llm-awq"),
        ({}, {"zero_point": 1}, "zero_point is 1, but must be true or false"),
        ({}, {"desc_act": True}, "desc_act = true"),
        ({}, {"smooth": 0.5}, "smooth = 0.5, a field that awq does not know"),
        ({}, {"modules_to_not_convert": ["mlp.down_proj"]}, "leaves .*down_proj as it is, but it is stored quant"),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, change: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    tensors = {end: tensor for end, tensor in {**GOOD, **change}.items() if tensor is not None}
    with pytest.raises((CheckpointError, ModelError, UnsupportedModel), match=message) as refused:
        opened(tmp_path, tensors, {**CONFIG, **config}).rows(NAME, 0, 16)
    assert refused.value.hint and refused.value.message.count(". ") == 0
