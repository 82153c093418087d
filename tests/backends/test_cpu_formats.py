"""A CPU's tiles of codes: packed without loss, and multiplied as their format says by every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from backends.code_cases import CODES, activations, honest_error, random_matrix, random_rows
from monotape.backends.cpu.bridge import isa_name
from monotape.backends.cpu.packer import NativePacker
from monotape.plan.formats import CPU_LAYOUTS, Format

FORMATS = [pytest.param(fmt, id=fmt.value) for fmt in CODES]
ISAS = ("", "portable")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_are_unpacked_as_the_format_says(fmt: Format, isa: str) -> None:
    matrix = random_matrix(fmt, 24, 300)
    got, exact = matrix.unpacked(isa), matrix.exact
    # Two roundings of float32: a product and a sum.
    assert np.all(
        np.abs(got - exact)
        <= 2.0**-23 * (np.abs(exact) + np.abs(got - exact) + np.abs(exact).max(1, keepdims=True))
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_packing_loses_no_bit(fmt: Format) -> None:
    """Another code, or another scale, is another tile: all of them are there."""
    rows = random_rows(fmt, 8, 256)
    before = random_matrix(fmt, 8, 256)
    bits, _, _ = CODES[fmt]
    assert before.unpacked().shape == (8, 256)
    for bit in range(bits):
        for k in range(0, 256, 31):
            tiles = np.zeros_like(before.tiles)
            changed = random_rows(fmt, 8, 256)
            changed.codes[k % 8, k] ^= np.uint8(1 << bit)
            assert NativePacker().pack_codes(fmt, changed, tiles) == -1
            assert int(np.unpackbits(tiles ^ before.tiles).sum()) == 1
    for name in ("d", "e", "s", "m", "scales", "minima"):
        part = getattr(rows, name)
        if part is not None:
            stored = np.ascontiguousarray(part).view(np.uint8)
            stored[5, -1] ^= np.uint8(1)
            tiles = np.zeros_like(before.tiles)
            assert NativePacker().pack_codes(fmt, rows, tiles) == -1
            assert int(np.unpackbits(tiles ^ before.tiles).sum()) == 1
            stored[5, -1] ^= np.uint8(1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [32, 300, 4100])
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_are_those_of_the_format(fmt: Format, k: int, isa: str) -> None:
    matrix, x = random_matrix(fmt, 16, k), activations(7, k)
    exact = x.astype(np.float64) @ matrix.exact.T
    got = matrix.products(x, isa)
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    assert error <= 2 * honest_error(x, matrix.exact) + np.finfo(np.float32).eps


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [32, 96, 4100])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_together_have_the_bits_of_each_alone(fmt: Format, k: int, isa: str) -> None:
    matrix = random_matrix(fmt, 24, k)
    for rows in (2, 4, 65):
        x = activations(rows, k)
        assert np.array_equal(matrix.products(x, isa, together=True), matrix.products(x, isa))


@pytest.mark.parametrize("fmt", FORMATS)
def test_instruction_sets_agree(fmt: Format) -> None:
    """They differ where plain C++ rounds a product before it adds it."""
    if isa_name() == "portable":
        pytest.skip("this machine has no other kernels")
    matrix, x = random_matrix(fmt, 16, 1000), activations(3, 1000)
    fast, portable = matrix.products(x), matrix.products(x, "portable")
    terms = np.abs(x.astype(np.float64)) @ np.abs(matrix.exact).T
    assert np.all(np.abs(fast - portable.astype(np.float64)) <= 1e-5 * terms)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_scale_that_is_not_finite_is_found(fmt: Format) -> None:
    layout = CPU_LAYOUTS[fmt]
    for name in ("d", "e", "scales", "minima"):
        for value in (np.inf, -np.inf, np.nan):
            rows = random_rows(fmt, 16, 256)
            part = getattr(rows, name)
            if part is not None:
                part[11, -1] = value
                assert (
                    NativePacker().pack_codes(fmt, rows, np.zeros((2, layout.tile_bytes(256)), np.uint8))
                    == 11
                )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_an_activation_that_is_not_finite_is_not_lost(fmt: Format, isa: str) -> None:
    matrix, x = random_matrix(fmt, 8, 96), activations(5, 96)
    x[2, 70] = np.nan
    for together in (False, True):
        finite = np.isfinite(matrix.products(x, isa, together=together))
        assert not finite[2].any() and finite[[0, 1, 3, 4]].all()
