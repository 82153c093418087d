"""Quantised matrices as the formats of tapes have them: codes, and the numbers of their groups (plan/formats.py).

A stored matrix fits a format if that format holds every one of its numbers; `coded` then gives its rows, and nothing is
rounded. Several formats may hold a matrix: Q8 holds Q4_0, WIDE holds every format of integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import Format
from monotape.weights.quantised.codes import E2M1
from monotape.weights.quantised.k_matrix import SUPER, KMatrix
from monotape.weights.quantised.stored import Kind, StoredMatrix

Quantised = StoredMatrix | KMatrix
Floats = NDArray[np.float32]
Plane = NDArray[Any]

BLOCK = 128  # values of k for which K-quants have their float scales here: half of GGUF's, so that ranks can share them
_INT4 = {
    Format.INT4_G32: (32, False), Format.INT4_G64: (64, False), Format.INT4_G128: (128, False),
    Format.INT4_G32Z: (32, True), Format.INT4_G64Z: (64, True), Format.INT4_G128Z: (128, True),
}  # fmt: skip
#: Values of k that share a number of `of_groups`; a row's own scale is for all of them.
GROUPS = {
    **{fmt: group for fmt, (group, _) in _INT4.items()},
    Format.FP8_BLOCK: 128, Format.MXFP4: 32, Format.Q8: 32, Format.Q4_1: 32, Format.Q5_0: 32,
    Format.Q4_K: 32, Format.Q5_K: 32, Format.Q6_K: 16, Format.K_MIXED: 16, Format.WIDE: 16,
}  # fmt: skip
_K_HOLDS = {
    Format.Q4_K: ("q4_k",), Format.Q5_K: ("q4_k", "q5_k"), Format.Q6_K: ("q6_k",),
    Format.K_MIXED: ("q4_k", "q5_k", "q6_k"), Format.WIDE: ("q4_k", "q5_k", "q6_k"),
}  # fmt: skip
_CHUNK_ROWS = 4096  # bounds the memory of a look at all scales
_HALF_TOP = 14  # the largest scale of a row becomes one from 2^14 to 2^15, so that small ones keep their bits


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Rows of a format, which says what the numbers are."""

    codes: NDArray[np.uint8]  # [rows, k]
    of_groups: tuple[Plane, ...] = ()  # [rows, groups] each: scale, then zero point, minimum or shift
    of_rows: tuple[Plane, ...] = ()  # [rows, blocks of 128] each: a K-quant's d, then its e
    row_scales: Floats | None = None  # [rows]; beside the tape

    def mapped(self, change: Callable[[Plane, int], Plane], group: int) -> Coded:
        """The same change of every plane: it gets the plane, and the values of k that an element of it is for.

        For a row's own scale that number is 0.
        """
        return Coded(
            change(self.codes, 1),
            tuple(change(plane, group) for plane in self.of_groups),
            tuple(change(plane, BLOCK) for plane in self.of_rows),
            None if self.row_scales is None else change(self.row_scales[:, None], 0)[:, 0],
        )


def unit_of(fmt: Format) -> int:
    """The values of k whose multiples a rank's share must begin at."""
    return BLOCK if fmt in (Format.Q4_K, Format.Q5_K, Format.Q6_K, Format.K_MIXED) else GROUPS.get(fmt, 1)


def fits(fmt: Format, matrix: Quantised, *, row_scales: bool) -> bool:
    """Does the format hold every number of the matrix? Reads all scales where they may not be float16.

    `row_scales`: whether rows have a scale besides those of their groups.
    """
    if isinstance(matrix, KMatrix):
        return matrix.label in _K_HOLDS.get(fmt, ())
    if matrix.group_of is not None:  # sorted_columns.py could not sort them
        return False
    return _fits(fmt, matrix, row_scales)


def _fits(fmt: Format, matrix: StoredMatrix, row_scales: bool) -> bool:
    one_group = matrix.groups == 1
    if fmt in GROUPS and not (one_group or matrix.group[1] % GROUPS[fmt] == 0):
        return False
    has_mins = matrix.read_mins is not None
    if fmt in (Format.FP8, Format.FP8_BLOCK):
        return matrix.kind is Kind.E4M3 and (one_group or fmt is Format.FP8_BLOCK)
    if fmt is Format.INT8:
        return matrix.kind is Kind.INT8 and matrix.symmetric and one_group
    if fmt in _INT4:
        symmetric = matrix.symmetric or _INT4[fmt][1]
        return (
            matrix.kind is Kind.INT4
            and symmetric
            and not has_mins
            and _scales_fit(matrix, with_rows=row_scales)
        )
    if fmt is Format.MXFP4:
        return matrix.kind is Kind.E2M1 and matrix.scale_kind == "e8m0"
    if fmt is Format.Q4_1:
        return has_mins and matrix.kind is Kind.INT4 and matrix.scale_kind == "f16"
    if fmt is Format.Q5_0:
        integers = matrix.kind in (Kind.INT4, Kind.INT5) and matrix.symmetric and not has_mins
        return integers and _scales_fit(matrix, with_rows=False)
    if fmt is Format.Q8:
        integers = matrix.kind in (Kind.INT4, Kind.INT5) or (matrix.kind is Kind.INT8 and matrix.symmetric)
        return integers and not has_mins and _scales_fit(matrix, with_rows=False)
    return fmt is Format.WIDE and matrix.kind is not Kind.E4M3


def _scales_fit(matrix: StoredMatrix, *, with_rows: bool) -> bool:
    """Are all scales float16, or, `with_rows`, float16 times a power of two for each row?"""
    if matrix.scale_kind == "f16" and matrix.divisor == 1.0:
        return True
    for start in range(0, matrix.rows, _CHUNK_ROWS):
        scales = matrix.float_scales(start, min(start + _CHUNK_ROWS, matrix.rows))
        halves, of_rows = (
            _in_halves(scales) if with_rows else (_halves(scales), np.ones(len(scales), np.float32))
        )
        if not np.array_equal(halves.astype(np.float32) * of_rows[:, None], scales):
            return False
    return True


def _halves(scales: Floats) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return scales.astype(np.float16)


def _in_halves(scales: Floats) -> tuple[NDArray[np.float16], Floats]:
    """Scales as float16 and a power of two for each row; 1 where float16 has them as they are."""
    plain = (_halves(scales).astype(np.float32) == scales).all(axis=1)
    largest = np.abs(scales).max(axis=1, initial=0)
    exponents = np.where(plain | (largest == 0), 0, np.frexp(largest)[1] - 1 - _HALF_TOP)
    of_rows = np.ldexp(np.float32(1), exponents).astype(np.float32)
    return _halves(scales / of_rows[:, None]), of_rows


def coded(fmt: Format, matrix: Quantised, start: int, stop: int) -> Coded:
    """Rows start..stop of a matrix that fits the format."""
    if isinstance(matrix, KMatrix):
        return _k_coded(fmt, matrix, start, stop)
    codes = matrix.values(start, stop)
    spread = _groups_of(fmt, matrix)
    if fmt in (Format.FP8, Format.INT8):
        return Coded(codes, row_scales=matrix.float_scales(start, stop)[:, 0])
    if fmt is Format.FP8_BLOCK:
        return Coded(codes, (matrix.float_scales(start, stop)[:, spread],))
    if fmt is Format.MXFP4:
        return Coded(codes, (matrix.scales(start, stop)[:, spread],))
    if fmt in _INT4:
        return _int4(matrix, codes, spread, start, stop, with_zeros=_INT4[fmt][1])
    if fmt is Format.Q4_1:
        mins = matrix.mins(start, stop)
        assert mins is not None
        return Coded(codes, (matrix.scales(start, stop)[:, spread], mins[:, spread]))
    if fmt in (Format.Q5_0, Format.Q8):
        return _centred(matrix, codes, spread, start, stop, middle=16 if fmt is Format.Q5_0 else 128)
    assert fmt is Format.WIDE, f"{matrix.name} ({matrix.label}) as {fmt}"
    return _wide(matrix, codes, spread, start, stop)


def _groups_of(fmt: Format, matrix: StoredMatrix) -> NDArray[np.int64]:
    """For each of the format's groups, the stored group that it is a part of."""
    size = GROUPS.get(fmt, matrix.columns)
    return np.arange(0, matrix.columns, size) // matrix.group[1]


def _int4(
    matrix: StoredMatrix, codes: NDArray[np.uint8], spread: NDArray[np.int64], start: int, stop: int,
    *, with_zeros: bool,
) -> Coded:  # fmt: skip
    scales, of_rows = _in_halves(matrix.float_scales(start, stop))
    planes = [scales[:, spread]]
    if with_zeros:
        zeros = matrix.zeros(start, stop)
        planes.append(
            np.full(planes[0].shape, matrix.kind.middle, np.float16)
            if zeros is None
            else zeros[:, spread].astype(np.float16)
        )
    return Coded(codes, tuple(planes), row_scales=of_rows)


def _centred(
    matrix: StoredMatrix, codes: NDArray[np.uint8], spread: NDArray[np.int64], start: int, stop: int,
    *, middle: int,
) -> Coded:  # fmt: skip
    """Codes whose zero is another number than the file's."""
    moved = matrix.centred(codes, matrix.zeros(start, stop)) + np.int16(middle)
    return Coded(moved.astype(np.uint8), (_halves(matrix.float_scales(start, stop))[:, spread],))


def _wide(
    matrix: StoredMatrix, codes: NDArray[np.uint8], spread: NDArray[np.int64], start: int, stop: int
) -> Coded:
    """A product of a scale and a zero point is rounded to float32: exact for scales of up to 16 bits."""
    scales = matrix.float_scales(start, stop)[:, spread]
    if matrix.kind is Kind.E2M1:  # halves from -6 to 6: integers from 0 to 24, whose zero is 12
        table = (2 * E2M1 + 12).astype(np.uint8)
        return Coded(table[codes], (scales * np.float32(0.5), scales * np.float32(-6)))
    if (mins := matrix.mins(start, stop)) is not None:
        return Coded(codes, (scales, mins[:, spread].astype(np.float32)))
    zeros = matrix.zeros(start, stop)
    of_groups = np.float32(matrix.kind.middle) if zeros is None else zeros[:, spread].astype(np.float32)
    return Coded(codes, (scales, -of_groups * scales))


def _k_coded(fmt: Format, matrix: KMatrix, start: int, stop: int) -> Coded:
    rows = matrix.k_rows(start, stop)
    d, dmin = (np.repeat(part, SUPER // BLOCK, axis=1) for part in (rows.d, rows.dmin))
    if fmt in (Format.Q4_K, Format.Q5_K):
        return Coded(rows.codes, (rows.scales[:, ::2], rows.mins[:, ::2]), (d, dmin))
    if fmt is Format.Q6_K:
        return Coded(rows.codes, (rows.scales,), (d,))
    if fmt is Format.K_MIXED:
        return Coded(rows.codes, (rows.scales, rows.mins), (d, dmin))
    assert fmt is Format.WIDE, f"{matrix.name} ({matrix.label}) as {fmt}"
    each = BLOCK // GROUPS[fmt]
    of_groups = (np.repeat(part.astype(np.float32), each, axis=1) for part in (d, dmin))
    scale, shift = (part * numbers for part, numbers in zip(of_groups, (rows.scales, rows.mins), strict=True))
    return Coded(rows.codes, (scale, -shift))
