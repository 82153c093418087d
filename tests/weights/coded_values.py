"""What the formats of tapes say that codes stand for, by the formulas of plan/formats.py, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import Format
from monotape.weights.coded import BLOCK, GROUPS, Coded, Floats, Plane
from monotape.weights.quantised.codes import E2M1, E4M3, E8M0


def values_of(fmt: Format, rows: Coded) -> Floats:
    """The numbers that a format says its codes stand for."""
    codes, k = rows.codes, rows.codes.shape[1]
    numbers: NDArray[np.float64] = codes.astype(np.float64)
    if fmt in (Format.FP8, Format.FP8_BLOCK):
        numbers = E4M3[codes].astype(np.float64)
    elif fmt is Format.MXFP4:
        numbers = E2M1[codes].astype(np.float64)
    planes = [_over_k(plane, GROUPS.get(fmt, k), k) for plane in rows.of_groups]
    if fmt is Format.MXFP4:
        planes = [_over_k(E8M0[rows.of_groups[0]], GROUPS[fmt], k)]
    super_planes = [_over_k(plane, BLOCK, k) for plane in rows.of_rows]
    row = 1.0 if rows.row_scales is None else rows.row_scales[:, None].astype(np.float64)
    if fmt in (Format.FP8, Format.FP8_BLOCK, Format.MXFP4, Format.INT8):
        return ((numbers - (128 if fmt is Format.INT8 else 0)) * (planes[0] if planes else 1.0) * row).astype(
            np.float32
        )
    if super_planes:
        scale = super_planes[0] * planes[0]
        shift = 32 * scale if fmt is Format.Q6_K else super_planes[1] * planes[1]
        return (numbers * scale - shift).astype(np.float32)
    if fmt in (Format.Q4_1, Format.WIDE):
        return (numbers * planes[0] + planes[1]).astype(np.float32)
    zero = planes[1] if len(planes) == 2 else {Format.Q8: 128, Format.Q5_0: 16}.get(fmt, 8)
    return ((numbers - zero) * planes[0] * row).astype(np.float32)


def _over_k(plane: Plane, width: int, k: int) -> NDArray[np.float64]:
    return np.repeat(plane.astype(np.float64), width, axis=1)[:, :k]
