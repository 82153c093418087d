"""GGUF's K-quants as codes and two levels of scales: one form that holds Q4_K, Q5_K and Q6_K exactly.

The element in row n and column k is, with g = k // 16 and b = k // 256,

    code[n, k] * (d[n, b] * scale[n, g]) - dmin[n, b] * min[n, g]

Q4_K and Q5_K have scales for 32 columns, which are repeated here. Q6_K subtracts 32 from its codes: its mins are its
scales, and dmin is 32 d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.quantised.stored import DAMAGED

GROUP, SUPER = 16, 256  # columns that share a scale of integers, and one of floats


@dataclass(frozen=True, slots=True, eq=False)
class KRows:
    """Some rows of a K-quant."""

    codes: NDArray[np.uint8]  # [rows, k]: 0..15, 0..31 or 0..63
    scales: NDArray[np.int8]  # [rows, k / 16]
    mins: NDArray[np.int8]  # [rows, k / 16]
    d: NDArray[np.float16]  # [rows, k / 256]
    dmin: NDArray[np.float16]  # [rows, k / 256]

    def values(self) -> NDArray[np.float32]:
        """The definition, rounded once. Float64 holds every product exactly."""
        factors = np.repeat(self.d.astype(np.float64), SUPER // GROUP, axis=1) * self.scales
        offsets = np.repeat(self.dmin.astype(np.float64), SUPER // GROUP, axis=1) * self.mins
        spread = (np.repeat(part, GROUP, axis=1)[:, : self.codes.shape[1]] for part in (factors, offsets))
        factor, offset = spread
        return (self.codes * factor - offset).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class KMatrix:
    """A whole matrix. Every method takes a range of rows and reads no more of the file than these need."""

    name: str  # as the plain model calls it
    shape: tuple[int, int]
    label: str  # "q4_k", "q5_k" or "q6_k"
    read: Callable[[int, int], KRows]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]

    def k_rows(self, start: int, stop: int) -> KRows:
        """Rows start..stop as they are stored. All scales are finite."""
        assert 0 <= start <= stop <= self.rows, f"rows {start}..{stop} of {self.name} {self.shape}"
        found = self.read(start, stop)
        good = np.isfinite(found.d) & np.isfinite(found.dmin)
        if not good.all():
            row, column = np.unravel_index(int(np.argmin(good)), good.shape)
            raise CheckpointError(
                f"Tensor {self.name} has scales of {found.d[row, column]} and {found.dmin[row, column]} in row "
                f"{start + int(row)}.",
                DAMAGED,
            )
        return found

    def dequantised(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop as float32: the definition of what the matrix holds."""
        return self.k_rows(start, stop).values()
