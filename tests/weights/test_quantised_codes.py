"""Every code of the small floats stands for the number that its standard says, and packed words fall apart right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monotape.weights.quantised.codes import E2M1, E4M3, E8M0, scales_as_float32
from monotape.weights.quantised.packing import AWQ_ORDER, along_columns, nibbles, transposed
from weights.quantised_files import E2M1_VALUES, e4m3_numbers


def test_all_codes_of_e4m3_are_those_of_torch() -> None:
    torch_says = e4m3_numbers(np.arange(256, dtype=np.uint8))
    assert E4M3.dtype == np.float32
    np.testing.assert_array_equal(
        E4M3.view(np.uint32)[np.isfinite(E4M3)], torch_says.view(np.uint32)[np.isfinite(torch_says)]
    )
    assert (
        np.flatnonzero(np.isnan(E4M3)).tolist()
        == np.flatnonzero(np.isnan(torch_says)).tolist()
        == [0x7F, 0xFF]
    )


def test_all_codes_of_e2m1_are_those_of_the_standard() -> None:
    np.testing.assert_array_equal(E2M1, E2M1_VALUES + [-value for value in E2M1_VALUES])
    assert np.signbit(E2M1[8])


def test_all_codes_of_e8m0_are_powers_of_two() -> None:
    import torch

    torch_says = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).to(torch.float32).numpy()
    np.testing.assert_array_equal(E8M0, torch_says)
    assert E8M0[127] == 1 and E8M0[0] == np.float32(2.0**-127) and np.isnan(E8M0[255])


@pytest.mark.parametrize(("kind", "words"), [("f32", np.float32), ("f16", np.float16)])
def test_scales_of_plain_dtypes(kind: str, words: type) -> None:
    scales = np.array([0.0, -0.5, 3e-5, 65504.0]).astype(words)
    np.testing.assert_array_equal(scales_as_float32(scales, kind), scales.astype(np.float32))


def test_scales_of_bf16() -> None:
    numbers = np.array([0.5, -1.75, 3.0], np.float32)
    words = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(scales_as_float32(words, "bf16"), numbers)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_words_fall_apart_bit_for_bit(values: list[int]) -> None:
    words = np.array(values, np.uint32).view(np.int32).reshape(2, 3)
    for bits in (4, 8):
        per_word, mask = 32 // bits, (1 << bits) - 1
        expected = [
            [values[r * 3 + c // per_word] >> (bits * (c % per_word)) & mask for c in range(3 * per_word)]
            for r in range(2)
        ]
        assert along_columns(words, bits).tolist() == expected
        assert transposed(words, bits).T.tolist() == expected
    ordered = [
        [values[r * 3 + c // 8] >> (4 * AWQ_ORDER.index(c % 8)) & 15 for c in range(24)] for r in range(2)
    ]
    assert transposed(words, 4, AWQ_ORDER).T.tolist() == ordered


def test_the_low_nibble_comes_first() -> None:
    assert nibbles(np.array([[0x21, 0x43]], np.uint8)).tolist() == [[1, 2, 3, 4]]
