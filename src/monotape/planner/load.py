"""What a pass over a model must read: weights in their format, and the past of every row."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.planner.precision import Precision, read_bytes_by_group, weight_bytes
from monotape.planner.shape import ROUTED, ModelShape, Part


@dataclass(frozen=True, slots=True)
class Load:
    """A model in a weight format and a KV format."""

    shape: ModelShape
    precision: Precision
    kv_value_bytes: float

    @property
    def weight_bytes(self) -> float:
        return weight_bytes(self.shape, self.precision)

    def bytes_by_group(self, context: int) -> dict[str, float]:
        """The bytes that one token reads at a context, by heading; "kv" is the last."""
        return {**read_bytes_by_group(self.shape, self.precision), "kv": self.kv_read(context)}

    def kv_read(self, context: int) -> float:
        return self.shape.kv_read_bytes(context, self.kv_value_bytes)

    def pass_bytes(self, context: int, rows: int = 1) -> float:
        """The bytes of one pass that computes a token for each of `rows` sequences at this context."""
        weights = sum(
            times * self.precision.read_bytes(part) * distinct_copies(part, rows) / part.chosen
            for part, times in self.shape.all_parts()
        )
        return weights + rows * self.kv_read(context)

    def flops(self, context: int, rows: int = 1) -> float:
        """The arithmetic of that pass: a multiplication and an addition for each weight, and attention."""
        return rows * (2.0 * self.shape.active + self.shape.score_flops(context))


def distinct_copies(part: Part, rows: int) -> float:
    """How many copies `rows` tokens read between them. Experts are taken as chosen evenly and independently."""
    if part.kind != ROUTED or rows == 1:
        return part.chosen
    missed = power(1 - part.chosen / part.copies, rows)
    return part.copies * (1 - missed)


def power(base: float, exponent: int) -> float:
    """base ** exponent by multiplication alone: the same bits on every machine, whatever its maths library."""
    result, square = 1.0, base
    while exponent:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result
