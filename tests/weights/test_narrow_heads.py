"""Keys and values in 8 bits: e4m3 and a power of two a head."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monotape.weights.quantised.codes import E4M3
from monotape.weights.rounding import fp8_heads

MAGNITUDES = E4M3[:127]


def heads(seed: int, size: float, dims: int = 64) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (np.random.default_rng(seed).standard_normal((5, 3, dims)) * size).astype(np.float32)


@given(seed=st.integers(0, 1000), exponent=st.integers(-12, 12))
def test_the_largest_code_is_never_wasted_and_never_too_small(seed: int, exponent: int) -> None:
    """Every head's largest value lies in the upper half of the codes' range, and nothing is cut off."""
    values = heads(seed, 2.0**exponent)
    kept = fp8_heads(values)
    largest, before = np.abs(kept).max(-1), np.abs(values).max(-1)
    assert np.all(np.abs(largest - before) <= before / 16)
    power = np.exp2(np.ceil(np.log2(before / 448)))
    clamped = np.clip(power, 2.0**-15, 2.0**7)
    codes = kept / clamped[..., None]
    assert np.isin(np.abs(codes), MAGNITUDES).all()


def test_errors_are_at_most_half_a_step() -> None:
    values = heads(1, 3.0)
    kept = fp8_heads(values)
    normal = np.abs(values) > np.abs(values).max(-1, keepdims=True) / 2**13
    assert np.all(np.abs(kept - values)[normal] <= np.abs(values)[normal] / 16)
    assert 0.02 < np.linalg.norm(kept - values) / np.linalg.norm(values) < 0.03


def test_rounding_twice_is_rounding_once() -> None:
    once = fp8_heads(heads(2, 0.7))
    assert np.array_equal(fp8_heads(once), once)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_head_with_a_value_that_is_not_finite_is_no_number(wrong: float) -> None:
    values = heads(3, 1.0)
    values[2, 1, 7] = wrong
    kept = fp8_heads(values)
    assert np.isnan(kept[2, 1]).all()
    assert np.isfinite(np.delete(kept.reshape(15, -1), 7, axis=0)).all()


def test_powers_end_where_halves_do() -> None:
    """2^-15 times the least code is the least float16; 2^7 times the largest code is below the largest one."""
    tiny, huge = np.full((1, 16), 2.0**-30, np.float32), np.full((1, 16), 3e5, np.float32)
    assert np.all(fp8_heads(tiny) == 0)
    assert np.all(fp8_heads(huge) == 448 * 2.0**7)
    assert np.all(fp8_heads(np.zeros((2, 16), np.float32)) == 0)
