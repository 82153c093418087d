"""A checkpoint some of whose matrices are quantised while they are read, because the user asked for it.

They look as if the file stored them so. The error of every row that was rounded is added up, to be told after loading.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import Format
from monotape.weights import rounding
from monotape.weights.check import require_finite
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.quantised.stored import Kind, StoredMatrix
from monotape.weights.raw import RawMatrix
from monotape.weights.replacing import ReplacingCheckpoint

Rounded = tuple[NDArray[np.uint8], NDArray[Any]]  # codes, scales
_SAMPLED_ROWS, _ALL_SAMPLED_ROWS = (
    32,
    8192,
)  # of a matrix, and of a model, which may have thousands of experts
NativeRounding = Callable[[Format, NDArray[np.float32]], Rounded | None]


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to round: what the codes are, and the columns that share a scale; None: all of them."""

    kind: Kind
    group: int | None
    scale_kind: str
    label: str
    round: Callable[[NDArray[np.float32]], Rounded]
    bits: int
    scale_bits: int


#: The formats that weights can be rounded to at load.
WAYS = {
    Format.FP8: _Way(Kind.E4M3, None, "f32", "fp8-channel", rounding.fp8_rows, 8, 32),
    Format.INT4_G128: _Way(Kind.INT4, rounding.INT4_GROUP, "f16", "int4-g128", rounding.int4_groups, 4, 16),
    Format.Q8: _Way(Kind.INT8, rounding.Q8_GROUP, "f16", "q8_0", rounding.q8_groups, 8, 16),
}


@dataclass(slots=True)
class Cost:
    """What rounding has cost so far, over all matrices of one format; relative to the numbers that were rounded."""

    values: int = 0
    bits: int = 0
    squares: float = 0.0
    squared_errors: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bits_per_weight(self) -> float:
        return self.bits / max(1, self.values)

    @property
    def relative_error(self) -> float:
        """Frobenius norm of the error, over that of the weights."""
        return (self.squared_errors / self.squares) ** 0.5 if self.squares else 0.0

    def add(self, values: int, bits: int, squares: float, squared_errors: float) -> None:
        with self.lock:
            self.values += values
            self.bits += bits
            self.squares += squares
            self.squared_errors += squared_errors


def bits_of(fmt: Format, rows: int, columns: int) -> int:
    """Of so many rounded weights, scales included."""
    way = WAYS[fmt]
    return rows * (way.bits * columns + way.scale_bits * -(-columns // (way.group or columns)))


def sampled_cost(checkpoint: Checkpoint, names: Collection[str], fmt: Format) -> Cost:
    """What rounding these matrices costs, by the errors of a few rows of each."""
    cost, way = Cost(), WAYS[fmt]
    sample = max(1, min(_SAMPLED_ROWS, _ALL_SAMPLED_ROWS // max(1, len(names))))
    for name in names:
        *before, columns = checkpoint.shape(name)
        rows = math.prod(before)
        cost.add(rows * columns, bits_of(fmt, rows, columns), 0.0, 0.0)
        for start in range(0, rows, -(-rows // sample)):
            exact = checkpoint.rows(name, start, start + 1)
            codes, scales = way.round(exact)
            made = _stored(name, codes, scales, way, way.group or columns).dequantised(0, 1)
            cost.add(0, 0, float(np.square(exact).sum()), float(np.square(made - exact).sum()))
    return cost


def _stored(name: str, codes: NDArray[np.uint8], scales: NDArray[Any], way: _Way, group: int) -> StoredMatrix:
    """Rounded rows, which know what they stand for."""
    return StoredMatrix(
        name, codes.shape, way.kind, (1, group), way.scale_kind,
        lambda first, last: codes[first:last], lambda first, last: scales[first:last],
    )  # fmt: skip


class RoundedCheckpoint(ReplacingCheckpoint):
    """Another checkpoint, rounded. `formats`: what each of some matrices is rounded to, by name."""

    def __init__(
        self, checkpoint: Checkpoint, formats: Mapping[str, Format], native: NativeRounding | None = None
    ) -> None:
        """`native`: rounds faster than NumPy, where it does not give None."""
        super().__init__(checkpoint, {})
        self._native = native
        self._formats = dict(formats)
        self._matrices = {name: self._matrix(name, WAYS[fmt]) for name, fmt in formats.items()}
        self._last = threading.local()  # codes and scales are asked for one after the other
        self.costs = {fmt: Cost() for fmt in self._formats.values()}

    def stored_as(self, name: str) -> str:
        matrix = self._matrices.get(name)
        return super().stored_as(name) if matrix is None else matrix.label

    def raw_matrix(self, name: str) -> RawMatrix | None:
        raw = self._checkpoint.raw_matrix(name)
        if raw is None or name not in self._formats:
            return raw
        return replace(raw, rounds_to=self._formats[name]) if raw.kind in ("bf16", "f16") else None

    def add_cost(self, fmt: Format, rows: int, columns: int, squares: float, squared_errors: float) -> None:
        """Rows that were rounded, here or by native code: squares of their values, and of the errors."""
        self.costs[fmt].add(rows * columns, bits_of(fmt, rows, columns), squares, squared_errors)

    def _matrix(self, name: str, way: _Way) -> StoredMatrix:
        shape = self._checkpoint.shape(name)
        return StoredMatrix(
            name, shape, way.kind, (1, way.group or shape[-1]), way.scale_kind,
            lambda start, stop: self._rounded(name, start, stop)[0],
            lambda start, stop: self._rounded(name, start, stop)[1],
            name_of_format=way.label,
        )  # fmt: skip

    def _rounded(self, name: str, start: int, stop: int) -> Rounded:
        place = (name, start, stop)
        if getattr(self._last, "place", None) != place:
            self._last.rounded = self._round(name, start, stop)
            self._last.place = place
        rounded: Rounded = self._last.rounded
        return rounded

    def _round(self, name: str, start: int, stop: int) -> Rounded:
        exact = self._checkpoint.rows(name, start, stop)
        require_finite(name, exact, start)
        fmt = self._formats[name]
        way = WAYS[fmt]
        codes, scales = (self._native and self._native(fmt, exact)) or way.round(exact)
        matrix = self._matrices[name]
        found = _stored(name, codes, scales, way, matrix.group[1])
        error = found.dequantised(0, len(codes)) - exact
        rows, columns = codes.shape
        self.add_cost(fmt, rows, columns, float(np.vdot(exact, exact)), float(np.vdot(error, error)))
        return codes, scales
