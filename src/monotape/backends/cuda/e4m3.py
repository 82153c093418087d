"""e4m3: eight-bit floats with four bits of exponent, by their 256 codes, of which 0x7f and 0xff are no numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0
_CODES = np.arange(127)
_EXPONENT, _MANTISSA = _CODES >> 3, _CODES & 7
#: The value of each code without its sign.
VALUES = np.where(
    _EXPONENT > 0, np.exp2(_EXPONENT - 7.0) * (1 + _MANTISSA / 8), np.exp2(-6.0) * _MANTISSA / 8
).astype(np.float32)
_MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounded to nearest, ties to even; larger values become the largest."""
    size = np.abs(values)
    code = np.searchsorted(_MIDDLES, size)
    tie = (code < len(_MIDDLES)) & (size == _MIDDLES[np.minimum(code, len(_MIDDLES) - 1)]) & (code % 2 == 1)
    codes: NDArray[np.uint8] = (code + tie + 128 * np.signbit(values)).astype(np.uint8)
    return codes


def by_row(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes and a scale for each row: its largest value becomes the largest code. A row of zeros has the scale 1."""
    largest = np.abs(values).max(axis=1, initial=0)
    scales = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    return to_e4m3(values / scales[:, None]), scales
