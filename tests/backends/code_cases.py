"""Rows of codes for every format of a CPU's tiles, what they mean, and the products that kernels make of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.bridge import FORMAT_CODES, library
from monotape.backends.cpu.packer import CodeRows, NativePacker
from monotape.plan.formats import CPU_LAYOUTS, TILE_ROWS, Format
from monotape.weights.quantised.codes import E2M1

Floats = NDArray[np.float32]

#: Bits of a code, values along k that share a scale, and the value that a code is less by.
CODES = {
    Format.Q8: (8, 32, 128),
    Format.INT4_G32: (4, 32, 8),
    Format.INT4_G64: (4, 64, 8),
    Format.INT4_G128: (4, 128, 8),
    Format.INT4_G32Z: (4, 32, 8),
    Format.INT4_G64Z: (4, 64, 8),
    Format.INT4_G128Z: (4, 128, 8),
    Format.Q4_1: (4, 32, 0),
    Format.Q5_0: (5, 32, 16),
    Format.Q4_K: (4, 32, 0),
    Format.Q5_K: (5, 32, 0),
    Format.Q6_K: (6, 16, 32),
    Format.K_MIXED: (6, 16, 0),
    Format.WIDE: (8, 16, 0),
    Format.MXFP4: (4, 32, 0),
}
ZERO_POINTS = (Format.INT4_G32Z, Format.INT4_G64Z, Format.INT4_G128Z)
TWO_LEVELS = (Format.Q4_K, Format.Q5_K, Format.Q6_K, Format.K_MIXED)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Random rows of a format, packed."""

    format: Format
    k: int
    rows: CodeRows
    tiles: NDArray[np.uint8]

    @property
    def exact(self) -> NDArray[np.float64]:
        """The format's definition, in float64, where every product is exact."""
        _, group, centre = CODES[self.format]
        rows, block = self.rows, CPU_LAYOUTS[self.format].k
        if self.format is Format.MXFP4:
            assert rows.s is not None
            exponents = (rows.s.view(np.uint8) ^ np.uint8(0x80)).astype(np.float64) - 127
            return (E2M1.astype(np.float64)[rows.codes] * 2 ** spread(exponents, 32))[:, : self.k]
        codes = rows.codes.astype(np.float64) - centre
        if rows.scales is not None and rows.minima is not None:
            return (codes * spread(rows.scales, 16) + spread(rows.minima, 16))[:, : self.k]
        assert rows.d is not None
        if self.format in TWO_LEVELS:
            assert rows.s is not None
            values = codes * spread(rows.d, block) * spread(rows.s, group)
            if rows.e is not None and rows.m is not None:
                values -= spread(rows.e, block) * spread(rows.m, group)
            return values[:, : self.k]
        scales = spread(rows.d, block)
        if self.format in ZERO_POINTS:
            assert rows.e is not None
            return ((codes + 8 - spread(rows.e, block)) * scales)[:, : self.k]
        minima = 0 if rows.e is None else spread(rows.e, block)
        return (codes * scales + minima)[:, : self.k]

    def products(self, x: Floats, isa: str = "", *, together: bool = False) -> Floats:
        """[rows of x, rows of the matrix], by the kernels of an instruction set."""
        count = len(self.rows.codes)
        y, x = np.empty((len(x), count), np.float32), np.ascontiguousarray(x)
        assert library().monotape_products(
            isa.encode(), FORMAT_CODES[self.format], self.tiles.ctypes.data, count // TILE_ROWS, self.k, x.ctypes.data,
            len(x), together, y.ctypes.data,
        )  # fmt: skip
        return y

    def unpacked(self, isa: str = "") -> Floats:
        out = np.empty((len(self.rows.codes), self.k), np.float32)
        assert library().monotape_unpack(
            isa.encode(), FORMAT_CODES[self.format], self.tiles.ctypes.data, len(out) // TILE_ROWS, self.k,
            out.ctypes.data,
        )  # fmt: skip
        return out


def spread(values: NDArray[np.generic], group: int) -> NDArray[np.float64]:
    return np.repeat(values.astype(np.float64), group, axis=1)


def random_rows(fmt: Format, count: int, k: int, seed: int = 0) -> CodeRows:
    """Codes over their whole range, scales of very different sizes."""
    generator = np.random.default_rng([seed, FORMAT_CODES[fmt], k])
    bits, group, _ = CODES[fmt]
    layout = CPU_LAYOUTS[fmt]
    padded = layout.padded(k)
    blocks, groups = padded // layout.k, padded // group
    codes = generator.integers(0, 1 << bits, (count, padded), np.uint8)

    def halves() -> NDArray[np.float16]:
        return np.ldexp(
            generator.uniform(0.5, 1, (count, blocks)), generator.integers(-12, -2, blocks)
        ).astype(np.float16)

    def bytes_up_to(least: int, most: int) -> NDArray[np.int8]:
        return generator.integers(least, most + 1, (count, groups)).astype(np.int8)

    if fmt is Format.WIDE:
        scales = generator.uniform(-0.01, 0.01, (count, groups)).astype(np.float32)
        return CodeRows(codes, scales=scales, minima=-128 * scales + np.float32(0.001))
    if fmt is Format.MXFP4:
        sizes = generator.integers(110, 130, groups) + generator.integers(0, 3, (count, groups))
        exponents = sizes.astype(np.uint8)
        return CodeRows(codes, s=(exponents ^ np.uint8(0x80)).view(np.int8))
    if fmt in ZERO_POINTS:
        return CodeRows(codes, halves(), generator.integers(0, 17, (count, blocks)).astype(np.float16))
    if fmt is Format.Q4_1:
        d = halves()
        return CodeRows(codes, d, (-7.5 * d.astype(np.float64)).astype(np.float16))
    if fmt in (Format.Q4_K, Format.Q5_K):
        d = halves()
        return CodeRows(
            codes, d, (d * np.float16(7)).astype(np.float16), bytes_up_to(0, 63), bytes_up_to(0, 63)
        )
    if fmt is Format.K_MIXED:
        d = halves()
        return CodeRows(
            codes, d, (d * np.float16(32)).astype(np.float16), bytes_up_to(-128, 127), bytes_up_to(-128, 127)
        )
    if fmt is Format.Q6_K:
        return CodeRows(codes, halves(), s=bytes_up_to(-128, 127))
    return CodeRows(codes, halves())


def random_matrix(fmt: Format, count: int, k: int, seed: int = 0) -> Matrix:
    rows = random_rows(fmt, count, k, seed)
    layout = CPU_LAYOUTS[fmt]
    tiles = np.zeros((count // TILE_ROWS, layout.tile_bytes(layout.padded(k))), np.uint8)
    assert NativePacker().pack_codes(fmt, rows, tiles) == -1
    return Matrix(fmt, k, rows, tiles)


def honest_error(x: Floats, weights: NDArray[np.float64]) -> float:
    """What rounding the activations to 16 bits costs by itself."""
    exact = x.astype(np.float64) @ weights.T
    rounded = x.astype(np.float16).astype(np.float64) @ weights.T
    return float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))


def activations(rows: int, k: int) -> Floats:
    generator = np.random.default_rng([rows, k])
    values = generator.normal(size=(rows, k)).astype(np.float32)
    values[:, ::37] *= 60  # outliers, as activations have them
    return values
