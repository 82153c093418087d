"""e4m3 as codes, and how codes lie on a GPU's tape: as the kernel reads them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from monotape.backends.cuda.blocks import pack_fp8
from monotape.backends.cuda.e4m3 import LARGEST, VALUES, by_row, to_e4m3
from monotape.plan.formats import GPU_LAYOUTS, TILE_ROWS, Format


def torch_codes(values: np.ndarray) -> np.ndarray:
    codes: np.ndarray = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes


def test_every_code_has_its_value() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(codes, VALUES)


def test_values_are_rounded_to_nearest_and_ties_to_even() -> None:
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    near = np.concatenate(
        [np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(999))]
    )
    values = np.concatenate([near, -near, VALUES, -VALUES]).astype(np.float32)
    assert np.array_equal(to_e4m3(values), torch_codes(values))
    assert to_e4m3(np.array([500.0, -1e9], np.float32)).tolist() == [0x7E, 0xFE]  # no such number is larger


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9))
def test_the_largest_value_of_a_row_becomes_the_largest_code(values: list[float]) -> None:
    row = np.array([values], np.float32)
    codes, scales = by_row(row)
    largest = np.abs(row).max()
    assert (
        np.abs(VALUES[codes & 0x7F] * scales[:, None]).max() == np.float32(LARGEST) * scales[0]
        or largest == 0
    )
    assert scales[0] > 0


def test_zeros_stay_zeros() -> None:
    codes, scales = by_row(np.zeros((2, 5), np.float32))
    assert not codes.any() and scales.tolist() == [1, 1]


def test_tiles_lie_as_the_kernel_reads_them() -> None:
    """The masks and shifts of kernels/formats/fp8.h, of every code in every place of a lane."""
    codes = np.random.default_rng(3).permutation(np.arange(3 * TILE_ROWS * 128) % 256).astype(np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8).reshape(-1, 128)
    tiles = np.zeros((len(codes) // TILE_ROWS, GPU_LAYOUTS[Format.FP8].tile_bytes(128)), np.uint8)
    pack_fp8(codes, tiles)
    words = tiles.view(np.uint32).reshape(
        len(tiles), 2, TILE_ROWS, 4, 2, 2
    )  # tile, block, row, column, group, word
    first = words & np.uint32(0x87F087F0)
    second = (words << np.uint32(4) & np.uint32(0x80F080F0)) | (words >> np.uint32(4) & np.uint32(0x07000700))
    pairs = np.stack([first, second], axis=-1)  # ..., word, pair
    halves = np.stack([pairs << np.uint32(16), pairs & np.uint32(0xFFFF0000)], axis=-1).view(np.float32)
    values = halves.astype(np.float64) * 2.0**120  # tile, block, row, column, group, word, pair, half
    seen = values.transpose(0, 2, 1, 4, 3, 5, 6, 7).reshape(codes.shape)
    expected = VALUES[codes & 0x7F] * np.where(codes >> 7, -1.0, 1.0)
    assert np.array_equal(seen, expected)
