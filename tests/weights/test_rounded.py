"""weights/rounding.py and rounded.py: weights quantised at load, what that costs, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray

from families import BY_NAME, make_checkpoint
from monotape.errors import CheckpointError
from monotape.plan.formats import Format
from monotape.weights.coded import coded, fits
from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.rounded import RoundedCheckpoint
from monotape.weights.rounding import fp8_rows, int4_groups, q8_groups
from weights.coded_values import values_of
from weights.safetensors_files import write_folder

NAME = "model.layers.1.mlp.down_proj.weight"
Floats = NDArray[np.float32]


def normal(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def int4_values(codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> Floats:
    steps = np.repeat(scales.astype(np.float32), 128, axis=1)[:, : codes.shape[1]]
    return (codes.astype(np.float32) - 8) * steps


def relative(found: Floats, exact: Floats) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def test_least_squares_beat_the_largest_value() -> None:
    """Of normal numbers in groups of 128: a scale by the largest value leaves 11 % or more."""
    exact = normal(64, 1024)
    codes, scales = int4_groups(exact)
    groups = exact.reshape(64, 8, 128)
    plain = np.abs(groups).max(axis=2, keepdims=True) / 7
    by_largest = np.clip(np.rint(groups / plain), -8, 7) * plain
    best = _searched(groups)
    error = relative(int4_values(codes, scales), exact)
    assert error < 0.93 * relative(by_largest.reshape(exact.shape), exact)
    assert error < 1.01 * relative(best.reshape(exact.shape), exact)


def _searched(groups: Floats) -> Floats:
    """The best of four hundred scales of either sign, for each group."""
    best, least = np.zeros_like(groups), np.full(groups.shape[:2], np.inf)
    ends = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)
    for end in np.linspace(5, 12, 200):
        for sign in (-1, 1):
            steps = sign * ends / end
            values = np.clip(np.rint(groups / steps), -8, 7) * steps
            errors = ((values - groups) ** 2).sum(axis=2)
            best = np.where((errors < least)[..., None], values, best)
            least = np.minimum(errors, least)
    return best.astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(seed=some.integers(0, 2**32 - 1), rows=some.integers(1, 5), columns=some.integers(1, 300))
def test_no_value_of_int4_is_far_off(seed: int, rows: int, columns: int) -> None:
    """Within the range of codes the error is at most half a step; nothing is worse than leaving a group out."""
    exact = normal(rows, columns, seed) * np.float32(10.0) ** np.random.default_rng(seed).integers(-3, 3)
    codes, scales = int4_groups(exact)
    assert codes.shape == exact.shape and scales.shape == (rows, -(-columns // 128))
    assert codes.max() <= 15
    values = int4_values(codes, scales)
    steps = np.abs(np.repeat(scales.astype(np.float32), 128, axis=1)[:, :columns])
    inside = (codes > 0) & (codes < 15)
    assert (np.abs(values - exact)[inside] <= 0.5001 * steps[inside]).all()
    assert np.linalg.norm(values - exact) <= np.linalg.norm(exact)


def test_groups_of_zeros_and_single_values() -> None:
    exact = np.zeros((3, 256), np.float32)
    exact[1, 5], exact[2, 200] = 3.0, -0.25
    for round_rows in (int4_groups, q8_groups):
        codes, scales = round_rows(exact)
        middle, group = (8, 128) if round_rows is int4_groups else (128, 32)
        steps = np.repeat(scales.astype(np.float32), group, axis=1)
        np.testing.assert_allclose((codes.astype(np.float32) - middle) * steps, exact, rtol=2e-3)


def test_fp8_is_torchs_e4m3_of_scaled_rows() -> None:
    exact = normal(40, 99, seed=4) * np.geomspace(1e-6, 1e4, 40, dtype=np.float32)[:, None]
    exact[7] = 0
    codes, scales = fp8_rows(exact)
    assert scales.shape == (40, 1) and scales[7] == 1
    theirs = torch.from_numpy(exact / scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(codes, theirs)
    assert (
        0.02
        < relative(torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy() * scales, exact)
        < 0.03
    )


@pytest.mark.parametrize("fmt", [Format.FP8, Format.INT4_G128, Format.Q8])
def test_a_rounded_checkpoint_looks_as_if_it_were_stored_so(tmp_path: Path, fmt: Format) -> None:
    plain = open_checkpoint(make_checkpoint(BY_NAME["llama"], tmp_path, "bfloat16"))
    opened = RoundedCheckpoint(plain, {NAME: fmt})
    other = NAME.replace("down", "up")
    assert opened.names == plain.names and opened.shape(NAME) == plain.shape(NAME)
    assert opened.stored_as(other) == "bf16" and opened.stored_matrix(other) is None
    assert opened.half_rows(NAME, 0, 3) is None and opened.mapped_halves(NAME) is None
    assert opened.half_rows(other, 0, 3) is not None and opened.mapped_halves(other) is not None
    matrix = opened.stored_matrix(NAME)
    assert isinstance(matrix, StoredMatrix) and fits(fmt, matrix, row_scales=True)
    rows = coded(fmt, matrix, 3, 17)
    values = opened.rows(NAME, 3, 17)
    np.testing.assert_array_equal(values_of(fmt, rows), values)
    error = {Format.FP8: 0.03, Format.INT4_G128: 0.12, Format.Q8: 0.006}[fmt]
    assert error / 3 < relative(values, plain.rows(NAME, 3, 17)) < error
    assert (opened.integer_rows(NAME, 3, 17) is not None) == (
        fmt is Format.Q8 and plain.shape(NAME)[1] % 32 == 0
    )


@pytest.mark.parametrize("fmt", [Format.FP8, Format.INT4_G128])
def test_the_cost_is_that_of_all_rows_once(tmp_path: Path, fmt: Format) -> None:
    plain = open_checkpoint(make_checkpoint(BY_NAME["llama"], tmp_path, "bfloat16"))
    opened = RoundedCheckpoint(plain, {NAME: fmt})
    rows, columns = plain.shape(NAME)
    matrix = opened.stored_matrix(NAME)
    assert isinstance(matrix, StoredMatrix)
    values = np.concatenate(
        [matrix.dequantised(start, min(start + 10, rows)) for start in range(0, rows, 10)]
    )
    cost = opened.costs[fmt]
    exact = plain.rows(NAME, 0, rows)
    assert cost.values == rows * columns
    assert cost.relative_error == pytest.approx(relative(values, exact), rel=1e-4)
    scales = 32 if fmt is Format.FP8 else 16 * -(-columns // 128)
    assert cost.bits_per_weight == pytest.approx((8 if fmt is Format.FP8 else 4) + scales / columns)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, value: float) -> None:
    exact = normal(9, 40)
    exact[6, 2] = value
    folder = write_folder(tmp_path, {"w": ("F32", exact)})
    opened = RoundedCheckpoint(open_checkpoint(folder), {"w": Format.INT4_G128})
    with pytest.raises(CheckpointError, match=r"^Tensor w holds (inf|nan) in row 6\."):
        opened.rows("w", 4, 9)
