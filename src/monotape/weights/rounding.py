"""Rounds rows of floats to codes and scales: the formats that weights can be quantised to at load."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.weights.quantised.codes import E4M3

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

E4M3_LARGEST = np.float32(448)
KV_POWERS = -15, 7
INT4_GROUP, INT4_MIDDLE = 128, 8
Q8_GROUP, Q8_MIDDLE = 32, 128
#: What the largest value of a group becomes, in steps: -8 is the end of the range, -10 cuts off a fifth of that value.
INT4_ENDS = (-6.5, -7.0, -7.5, -8.0, -8.5, -9.0, -9.5, -10.0)
_MAGNITUDES = E4M3[:127]
_MIDDLES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2


def fp8_rows(values: Floats) -> tuple[Codes, Floats]:
    """e4m3 and a float32 scale a row: the largest value of a row becomes the largest code. [rows, k], [rows, 1]"""
    largest = np.abs(values).max(axis=1, initial=0, keepdims=True)
    scales = np.where(largest > 0, largest / E4M3_LARGEST, np.float32(1)).astype(np.float32)
    return to_e4m3(values / scales), scales


def to_e4m3(values: Floats) -> Codes:
    """Rounded to nearest, ties to even; larger values become the largest."""
    size = np.abs(values)
    code = np.searchsorted(_MIDDLES, size)
    tie = (code < len(_MIDDLES)) & (size == _MIDDLES[np.minimum(code, len(_MIDDLES) - 1)]) & (code % 2 == 1)
    codes: Codes = (code + tie + 128 * np.signbit(values)).astype(np.uint8)
    return codes


def fp8_heads(values: Floats) -> Floats:
    """Keys or values as they are kept in 8 bits: e4m3 times a power of two for each head, the last axis.

    It is the least power that leaves no value larger than the largest code, within what 16-bit floats of both kinds
    have exactly. A head with a value that is not finite becomes NaN.
    """
    largest = np.abs(values).max(axis=-1, keepdims=True).astype(np.float32)
    power = np.clip(((largest.view(np.int32) + 0x1FFFFF) >> 23) - 135, *KV_POWERS)
    scale = np.ldexp(np.float32(1), power).astype(np.float32)
    rounded = E4M3[to_e4m3(np.where(np.isfinite(values), values, 0) / scale)] * scale
    kept: Floats = np.where(np.isfinite(largest), rounded, np.float32(np.nan)).astype(np.float32)
    return kept


def int4_groups(values: Floats) -> tuple[Codes, NDArray[np.float16]]:
    """Codes 0..15, whose zero is 8, and a float16 scale for each group of 128: the least squared error.

    For each of several first guesses of the scale, values are rounded; the best scale for those integers q is then
    <q, w> / <q, q>. The scale that leaves the least error wins, and values are rounded by it once more.
    """
    groups = _grouped(values, INT4_GROUP)
    ends = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0]
    energy = np.einsum("rgk,rgk->rg", groups, groups)
    best = np.zeros(ends.shape, np.float16)
    least = energy.copy()  # the error of a scale of 0
    for end in INT4_ENDS:
        integers = _integers(groups, ends / np.float32(end), -8, 7)
        along, length = (np.einsum("rgk,rgk->rg", integers, other) for other in (groups, integers))
        with np.errstate(over="ignore"):  # a scale that is no float16 number is refused with its row
            scales = (along / np.where(length > 0, length, 1)).astype(np.float16)
        steps = scales.astype(np.float32)
        errors = energy - steps * (2 * along - steps * length)
        better = errors < least
        best, least = np.where(better, scales, best), np.where(better, errors, least)
    codes = _integers(groups, best.astype(np.float32), -8, 7) + INT4_MIDDLE
    return _ungrouped(codes, values), best


def q8_groups(values: Floats) -> tuple[Codes, NDArray[np.float16]]:
    """Codes 1..255, whose zero is 128, and a float16 scale for each group of 32, just large enough for its values."""
    groups = _grouped(values, Q8_GROUP)
    largest = np.abs(groups).max(axis=2)
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(127)).astype(np.float16)
        short = largest > np.float32(127.5) * scales.astype(np.float32)
        scales = np.where(short, np.nextafter(scales, np.float16(np.inf)), scales).astype(np.float16)
    codes = _integers(groups, scales.astype(np.float32), -127, 127) + Q8_MIDDLE
    return _ungrouped(codes, values), scales


def _grouped(values: Floats, size: int) -> Floats:
    """[rows, groups, size], the last group filled with zeros."""
    rows, k = values.shape
    padded = np.pad(values, ((0, 0), (0, -k % size)))
    return padded.reshape(rows, padded.shape[1] // size, size)


def _ungrouped(codes: Floats, values: Floats) -> Codes:
    rows, k = values.shape
    return np.ascontiguousarray(codes.reshape(rows, codes.shape[1] * codes.shape[2])[:, :k].astype(np.uint8))


def _integers(groups: Floats, scales: Floats, low: int, high: int) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(scales != 0, np.float32(1) / scales, np.float32(0))
    return np.clip(np.rint(groups * inverse[..., None]), low, high)
