"""The numbers that stored codes stand for: e4m3, e2m1 and e8m0 by table, scales of every dtype as float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def _small_floats(exponent_bits: int, mantissa_bits: int) -> Floats:
    """Every code of a float of sign, exponent and mantissa, all codes finite."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    bias = (1 << (exponent_bits - 1)) - 1
    whole = np.where(exponent > 0, 1 << mantissa_bits, 0) + mantissa
    values: NDArray[np.float64] = sign * np.ldexp(
        whole.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits
    )
    return values.astype(np.float32)


def _e4m3() -> Floats:
    table = _small_floats(4, 3)
    table[[0x7F, 0xFF]] = np.nan  # its only codes that are no numbers: there is no infinity
    return table


def _e8m0() -> Floats:
    table = np.full(256, np.nan, np.float32)  # the last code is no number
    table[:255] = np.ldexp(1.0, np.arange(255) - 127)  # the first, 2^-127, is a subnormal float32
    return table


E4M3 = _e4m3()
E2M1 = _small_floats(2, 1)
E8M0 = _e8m0()

#: The arrays that hold scales as they are stored, by the names of safetensors in lower case. A U8 scale is an exponent.
SCALE_WORDS: dict[str, str] = {
    "f32": "<f4", "f16": "<f2", "bf16": "<u2", "f8_e4m3": "|u1", "f8_e8m0": "|u1", "u8": "|u1",
}  # fmt: skip
#: What those dtypes are called in a StoredMatrix.
SCALE_KINDS: dict[str, str] = {
    "f32": "f32", "f16": "f16", "bf16": "bf16", "f8_e4m3": "e4m3", "f8_e8m0": "e8m0", "u8": "e8m0",
}  # fmt: skip


def scales_as_float32(words: NDArray[Any], kind: str) -> Floats:
    """Scales as they are stored, as float32; each kind is a subset of it, so nothing is rounded."""
    if kind == "bf16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    if kind in ("e4m3", "e8m0"):
        return np.take(E4M3 if kind == "e4m3" else E8M0, words)
    with np.errstate(invalid="ignore"):  # a signalling NaN is refused with its row
        numbers: Floats = words.astype(np.float32)
    return numbers
