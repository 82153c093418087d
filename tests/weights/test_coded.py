"""weights/coded.py: every stored format as formats of tapes, exactly, and what fits none is said not to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Gguf
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray

from monotape.plan.formats import Format
from monotape.weights.checkpoint import Quantised
from monotape.weights.coded import GROUPS, coded, fits, unit_of
from monotape.weights.gguf_file import GgufFile
from monotape.weights.quantised.stored import Kind, StoredMatrix
from weights.coded_values import values_of
from weights.gguf_files import write_gguf
from weights.test_gguf_matrix import _raw as raw_blocks

INT4 = (Format.INT4_G32, Format.INT4_G64, Format.INT4_G128)
INT4_Z = (Format.INT4_G32Z, Format.INT4_G64Z, Format.INT4_G128Z)
K_QUANTS = (Format.Q4_K, Format.Q5_K, Format.Q6_K, Format.K_MIXED)


def matrix(
    kind: Kind, rows: int, columns: int, group: int, *, scale_kind: str = "f16", zeros: bool = False, seed: int = 0,
    spread: int = 3,
) -> StoredMatrix:  # fmt: skip
    """Random codes and scales. `spread`: powers of ten that scales differ by."""
    rng = np.random.default_rng(seed)
    top = {Kind.E2M1: 16, Kind.INT4: 16, Kind.INT5: 32}.get(kind, 256)
    codes = rng.integers(0, top, (rows, columns), dtype=np.uint8)
    if kind is Kind.E4M3:
        codes[(codes & 0x7F) == 0x7F] = 3
    groups = -(-columns // group)
    powers = 10.0 ** -rng.integers(1, 1 + spread, (rows, groups))
    numbers = (rng.uniform(0.5, 2, (rows, groups)) * powers).astype(np.float32)
    scales = {
        "f32": numbers, "f16": numbers.astype(np.float16), "bf16": (numbers.view(np.uint32) >> 16).astype(np.uint16),
        "e8m0": rng.integers(100, 140, (rows, groups), dtype=np.uint8),
        "e4m3": rng.integers(1, 120, (rows, groups), dtype=np.uint8),
    }[scale_kind]  # fmt: skip
    stored = rng.integers(0, top, (rows, groups), dtype=np.uint8) if zeros else None
    return StoredMatrix(
        "m", (rows, columns), kind, (1, group), scale_kind, lambda a, b: codes[a:b], lambda a, b: scales[a:b],
        None if stored is None else lambda a, b: stored[a:b], symmetric=not zeros,
        divisor=3.0 if scale_kind == "e4m3" else 1.0,
    )  # fmt: skip


def held(stored: Quantised, *, row_scales: bool = True) -> set[Format]:
    return {fmt for fmt in Format if fits(fmt, stored, row_scales=row_scales)}


def check(fmt: Format, stored: Quantised, start: int = 0, stop: int | None = None) -> None:
    """The format's own formula gives the file's numbers."""
    last = stored.rows if stop is None else stop
    rows = coded(fmt, stored, start, last)
    width = GROUPS.get(fmt)
    assert all(
        width and plane.shape == (last - start, -(-stored.columns // width)) for plane in rows.of_groups
    )
    np.testing.assert_array_equal(values_of(fmt, rows), stored.dequantised(start, last))


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (matrix(Kind.INT4, 9, 256, 32), {Format.INT4_G32, Format.INT4_G32Z, Format.Q5_0, Format.Q8, Format.WIDE}),
        (matrix(Kind.INT4, 9, 256, 64, zeros=True), {Format.INT4_G32Z, Format.INT4_G64Z, Format.Q8, Format.WIDE}),
        (matrix(Kind.INT4, 9, 256, 128), {*INT4, *INT4_Z, Format.Q5_0, Format.Q8, Format.WIDE}),
        (matrix(Kind.INT4, 9, 256, 16), {Format.WIDE}),
        (matrix(Kind.INT4, 9, 100, 100, scale_kind="f32"), {Format.WIDE}),
        (matrix(Kind.INT4, 9, 100, 100), {*INT4, *INT4_Z, Format.Q5_0, Format.Q8, Format.WIDE}),
        (matrix(Kind.INT5, 9, 96, 32), {Format.Q5_0, Format.Q8, Format.WIDE}),
        (matrix(Kind.INT8, 9, 96, 32), {Format.Q8, Format.WIDE}),
        (matrix(Kind.INT8, 9, 96, 32, zeros=True), {Format.WIDE}),
        (matrix(Kind.INT8, 9, 100, 100, scale_kind="f32"), {Format.INT8, Format.WIDE}),
        (matrix(Kind.INT8, 9, 96, 24), set()),
        (matrix(Kind.E4M3, 9, 100, 100, scale_kind="f32"), {Format.FP8, Format.FP8_BLOCK}),
        (matrix(Kind.E4M3, 9, 300, 128, scale_kind="bf16"), {Format.FP8_BLOCK}),
        (matrix(Kind.E4M3, 9, 96, 24, scale_kind="f32"), set()),
        (matrix(Kind.E2M1, 9, 96, 32, scale_kind="e8m0"), {Format.MXFP4, Format.WIDE}),
        (matrix(Kind.E2M1, 9, 96, 16, scale_kind="e4m3"), {Format.WIDE}),
    ],
    ids=lambda value: f"{value.label}-{value.scale_kind}" if isinstance(value, StoredMatrix) else None,
)  # fmt: skip
def test_formats_that_hold_a_matrix(stored: StoredMatrix, expected: set[Format]) -> None:
    assert held(stored) == expected
    exact = stored.scale_kind not in ("f32", "e4m3")
    for fmt in expected:
        if fmt is not Format.WIDE or exact:
            check(fmt, stored, 2, 7)


@pytest.mark.parametrize("zeros", [False, True])
def test_wide_is_exact_but_for_the_rounding_of_a_shift(zeros: bool) -> None:
    """A float32 scale times a zero point may need more than 24 bits: half a unit in its last place is lost."""
    stored = matrix(Kind.INT8, 9, 96, 32, scale_kind="f32", zeros=zeros)
    rows = coded(Format.WIDE, stored, 0, 9)
    exact = stored.dequantised(0, 9)
    error = np.abs(values_of(Format.WIDE, rows) - exact)
    shifts = np.repeat(np.abs(rows.of_groups[1]), 16, axis=1)[:, :96]
    assert (error <= 2.0**-24 * (shifts + 2 * np.abs(exact))).all()


def test_bfloat16_scales_fit_float16_with_a_power_of_two_for_each_row() -> None:
    stored = matrix(Kind.INT4, 40, 512, 128, scale_kind="bf16", spread=6)
    assert Format.INT4_G128 in held(stored)
    assert held(stored, row_scales=False) == {Format.WIDE}, (
        "some scales are too small for float16's precision"
    )
    check(Format.INT4_G128, stored)
    rows = coded(Format.INT4_G128, stored, 0, 40)
    assert rows.row_scales is not None and (np.frexp(rows.row_scales)[0] == 0.5).all()
    far = matrix(Kind.INT4, 8, 512, 64, scale_kind="bf16", spread=30)
    assert held(far) == {Format.WIDE}
    check(Format.WIDE, far)


def test_a_file_whose_columns_are_sorted_fits_nothing() -> None:
    from dataclasses import replace

    stored = matrix(Kind.INT4, 8, 64, 32)
    order = np.random.default_rng(0).permutation(64).astype(np.int32) // 32
    assert not held(replace(stored, group_of=order))


@settings(max_examples=8, deadline=None)
@given(seed=some.integers(0, 2**32 - 1), rows=some.integers(1, 9), blocks=some.integers(1, 4))
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Gguf.Q4_0, {Format.INT4_G32, Format.INT4_G32Z, Format.Q5_0, Format.Q8, Format.WIDE}),
        (Gguf.Q4_1, {Format.Q4_1, Format.WIDE}),
        (Gguf.Q5_0, {Format.Q5_0, Format.Q8, Format.WIDE}),
        (Gguf.Q8_0, {Format.Q8, Format.WIDE}),
        (Gguf.MXFP4, {Format.MXFP4, Format.WIDE}),
        (Gguf.Q4_K, {Format.Q4_K, Format.Q5_K, Format.K_MIXED, Format.WIDE}),
        (Gguf.Q5_K, {Format.Q5_K, Format.K_MIXED, Format.WIDE}),
        (Gguf.Q6_K, {Format.Q6_K, Format.K_MIXED, Format.WIDE}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_formats_that_hold_ggufs_blocks(
    tmp_path_factory: pytest.TempPathFactory, kind: Gguf, expected: set[Format], seed: int, rows: int, blocks: int
) -> None:  # fmt: skip
    raw: NDArray[np.uint8] = raw_blocks(kind, rows, 256 * blocks, seed)
    path: Path = tmp_path_factory.mktemp("x") / "x.gguf"
    stored = GgufFile(write_gguf(path, "other", {}, {"x": (kind, raw)})).stored_matrix("x")
    assert stored is not None
    assert held(stored, row_scales=False) == held(stored) == expected
    for fmt in expected:
        check(fmt, stored)


def test_ranks_may_cut_k_where_groups_begin() -> None:
    assert {fmt: unit_of(fmt) for fmt in (Format.FP8, Format.INT8, Format.WIDE, Format.Q8, Format.INT4_G128)} == {
        Format.FP8: 1, Format.INT8: 1, Format.WIDE: 16, Format.Q8: 32, Format.INT4_G128: 128,
    }  # fmt: skip
    assert {unit_of(fmt) for fmt in K_QUANTS} == {128}
