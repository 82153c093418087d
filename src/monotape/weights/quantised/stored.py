"""A quantised matrix exactly as a file stores it, whatever method made it: codes, scales, zero points and groups.

The element in row n and column k is

    (value[n, k] - zero[n, g]) * (scale[n, g] / divisor)      with g = k // group[1], or group_of[k]

in float32. An integer format without zero points has the middle of its range as the zero point of every group; a float
format has none, and its value is the number that the code stands for. GGUF's Q4_1 has minima instead of zero points:

    value[n, k] * scale[n, g] + min[n, g]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.quantised.codes import E2M1, E4M3, scales_as_float32
from monotape.weights.quantised.packing import Codes

Number = TypeVar("Number", np.float32, np.uint8)
Scales = NDArray[Any]  # f32, f16; bf16 as uint16; e4m3 and e8m0 as uint8
DAMAGED = "The file is damaged or its quantisation went wrong: fetch it again or use another checkpoint."
Q8_BLOCK = 32  # columns that share a scale in the CPU's 8-bit format
_CHUNK_ROWS = 4096  # bounds the memory of a look at all scales


class Kind(Enum):
    """What a code stands for."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"
    INT4 = "int4"
    INT5 = "int5"
    INT8 = "int8"

    @property
    def middle(self) -> int:
        """The zero point of an integer format that stores none: codes are 0..15, 0..31 or 0..255."""
        return {Kind.INT4: 8, Kind.INT5: 16, Kind.INT8: 128}[self]

    @property
    def is_float(self) -> bool:
        return self in (Kind.E4M3, Kind.E2M1)


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """N rows by K columns. Every method takes a range of rows and reads no more of the file than these need."""

    name: str  # as the plain model calls it
    shape: tuple[int, ...]  # the last is K; all before it are rows, one after another
    kind: Kind
    group: tuple[int, int]  # rows and columns that share a scale
    scale_kind: str  # "f32", "f16", "bf16", "e4m3" or "e8m0"
    read_values: Callable[[int, int], Codes]
    read_scales: Callable[[int, int], Scales]
    read_zeros: Callable[[int, int], Codes | None] | None = None
    group_of: NDArray[np.int32] | None = None  # of each column; None: column k is in group k // group[1]
    divisor: float = 1.0  # of all scales
    symmetric: bool = True  # no zero points: `zeros` is None for all rows
    read_mins: Callable[[int, int], NDArray[np.float16]] | None = (
        None  # instead of zero points, even the middle
    )
    name_of_format: str = ""  # where the file has a name for it; else `label` makes one

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.columns // self.group[1])

    @property
    def order(self) -> NDArray[np.int64] | None:
        """The columns sorted by group: column order[j] belongs to group j // group[1]. None: they already are."""
        return None if self.group_of is None else np.argsort(self.group_of, kind="stable")

    @property
    def label(self) -> str:
        """What `Checkpoint.stored_as` says of it."""
        if self.name_of_format:
            return self.name_of_format
        if self.kind is Kind.E2M1:
            return "mxfp4" if self.scale_kind == "e8m0" else "nvfp4"
        name = "fp8" if self.kind is Kind.E4M3 else self.kind.value
        height, width = self.group
        if height == 1:
            return f"{name}-channel" if width >= self.columns else f"{name}-g{width}"
        return f"{name}-tensor" if self.group == (self.rows, self.columns) else f"{name}-block"

    def values(self, start: int, stop: int) -> Codes:
        """The codes of rows start..stop, one a byte: [rows, K]. Integers are offset: 0..15, 0..31 or 0..255."""
        self._require(start, stop)
        values = self.read_values(start, stop)
        if self.kind is Kind.E4M3:
            wrong = np.flatnonzero(((values & 0x7F) == 0x7F).any(axis=1))
            if len(wrong):
                raise CheckpointError(
                    f"Tensor {self.name} holds a NaN in row {start + int(wrong[0])}.", DAMAGED
                )
        return values

    def scales(self, start: int, stop: int) -> Scales:
        """The scales of rows start..stop as they are stored, one line a row: [rows, groups]. All are finite.

        Those of a float format are not negative; those of integers may be.
        """
        self._require(start, stop)
        scales = self.read_scales(start, stop)
        numbers = scales_as_float32(scales, self.scale_kind)
        good = np.isfinite(numbers)
        if self.kind.is_float:
            good &= numbers >= 0
        if not good.all():
            row, column = np.unravel_index(int(np.argmin(good)), good.shape)
            raise CheckpointError(
                f"Tensor {self.name} has a scale of {numbers[row, column]} in row {start + int(row)}.",
                DAMAGED,
            )
        return scales

    def zeros(self, start: int, stop: int) -> Codes | None:
        """The zero points of rows start..stop: [rows, groups], in the range of the codes.

        None: all are the middle, 8, 16 or 128, or the format is one of floats, or there are minima. A symmetric file
        that stores zero points all the same has them checked here.
        """
        self._require(start, stop)
        found = None if self.read_zeros is None else self.read_zeros(start, stop)
        assert (found is None) == self.symmetric, f"zero points of {self.name}"
        return found

    def mins(self, start: int, stop: int) -> NDArray[np.float16] | None:
        """The minima of rows start..stop: [rows, groups]. None: the format has none."""
        self._require(start, stop)
        if self.read_mins is None:
            return None
        found = self.read_mins(start, stop)
        good = np.isfinite(found)
        if not good.all():
            row, column = np.unravel_index(int(np.argmin(good)), good.shape)
            raise CheckpointError(
                f"Tensor {self.name} has a minimum of {found[row, column]} in row {start + int(row)}.",
                DAMAGED,
            )
        return found

    def float_scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """The scales of rows start..stop as the factors of the definition, the divisor applied."""
        numbers = scales_as_float32(self.scales(start, stop), self.scale_kind)
        return numbers if self.divisor == 1.0 else numbers / np.float32(self.divisor)

    def dequantised(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop as float32: the definition of what the matrix holds."""
        values = self.values(start, stop)
        if self.kind.is_float:
            numbers = np.take(
                E4M3 if self.kind is Kind.E4M3 else E2M1, values, mode="clip"
            )  # codes are in range
        elif (mins := self.mins(start, stop)) is not None:
            scales = self.spread(self.float_scales(start, stop))
            return values.astype(np.float32) * scales + self.spread(mins.astype(np.float32))
        else:
            numbers = self.centred(values, self.zeros(start, stop)).astype(np.float32)
        with np.errstate(over="ignore"):  # check.require_finite reports the row
            numbers *= self.spread(self.float_scales(start, stop))
        return numbers

    def centred(self, values: Codes, zeros: Codes | None) -> NDArray[np.int16]:
        """The integers that are multiplied by the scales: codes less their zero points."""
        if zeros is None:
            return values.astype(np.int16) - np.int16(self.kind.middle)
        return values.astype(np.int16) - self.spread(zeros).astype(np.int16)

    def spread(self, of_groups: NDArray[Number]) -> NDArray[Number]:
        """One column for each k, or a single one for all, from one column for each group."""
        if self.group_of is not None:
            return np.take(of_groups, self.group_of, axis=1)
        if self.groups == 1:
            return of_groups
        return np.repeat(of_groups, self.group[1], axis=1)[:, : self.columns]

    def fits_q8(self) -> bool:
        """Are its numbers int8 with an f16 scale per 32 columns, exactly? Reads all scales where they are bf16."""
        width = self.group[1] if self.groups > 1 else self.columns
        integers = self.kind in (Kind.INT4, Kind.INT5) or (self.kind is Kind.INT8 and self.symmetric)
        if self.read_mins is not None:
            return False
        if not integers or width % Q8_BLOCK or self.columns % Q8_BLOCK or self.group_of is not None:
            return False
        if self.scale_kind != "bf16":
            return self.scale_kind == "f16"
        ranges = ((start, min(start + _CHUNK_ROWS, self.rows)) for start in range(0, self.rows, _CHUNK_ROWS))
        return all(_are_halves(self.float_scales(start, stop)) for start, stop in ranges)

    def as_q8(self, start: int, stop: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
        """Rows start..stop as int8 and an f16 scale per 32 columns, of a matrix that `fits_q8`."""
        scales = self.float_scales(start, stop).astype(np.float16)
        integers = self.centred(self.values(start, stop), self.zeros(start, stop)).astype(np.int8)
        return integers, np.repeat(scales, self.columns // Q8_BLOCK // self.groups, axis=1)

    def _require(self, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= self.rows, f"rows {start}..{stop} of {self.name} {self.shape}"


def _are_halves(numbers: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(numbers.astype(np.float16).astype(np.float32), numbers)
