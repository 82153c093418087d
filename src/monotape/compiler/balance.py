"""Second pass: who owns which tiles, so that every worker reads the same number of bytes in a layer.

Each stage is dealt out evenly in whole units; what rounding leaves uneven is evened out in the largest stage, whose
units are many and small. One stage may be lopsided: only the sum over a layer costs time, because a worker that
finishes a stage early plays on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from monotape.compiler.stages import StageShape
from monotape.plan.types import Format, Machine, Span, Stage


def _units(shape: StageShape) -> int:
    return shape.tiles // shape.unit


def _unit_bytes(shape: StageShape, fmt: Format) -> int:
    return shape.unit * fmt.tile_bytes(shape.padded_k)


def even_shares(units: int, workers: int) -> list[int]:
    """Units per worker, spread so that no two neighbours differ by more than one."""
    bounds = [units * worker // workers for worker in range(workers + 1)]
    return [end - start for start, end in pairwise(bounds)]


def levelling_shares(units: int, unit_bytes: int, loads: Sequence[int]) -> list[int]:
    """Units per worker that bring uneven `loads` (bytes they already have) as level as whole units can."""
    level = (sum(loads) + units * unit_bytes) / len(loads)
    wanted = [max(0.0, (level - load) / unit_bytes) for load in loads]
    scale = units / sum(wanted)  # > 1 only if somebody is above the level already
    shares, given, due = [], 0, 0.0
    for want in wanted:
        due += want * scale
        shares.append(round(due) - given)
        given += shares[-1]
    shares[-1] += units - given
    return shares


def _spans(shares: Sequence[int], unit: int) -> tuple[Span, ...]:
    spans, first = [], 0
    for share in shares:
        spans.append(Span(first, share * unit))
        first += share * unit
    return tuple(spans)


def _owned(shape: StageShape, shares: Sequence[int]) -> Stage:
    return Stage(
        name=shape.name, parts=shape.parts, interleaved=shape.interleaved, k=shape.k, padded_k=shape.padded_k,
        tiles=shape.tiles, unit=shape.unit, spans=_spans(shares, shape.unit), reads=shape.reads, writes=shape.writes,
        first_k=shape.first_k,
    )  # fmt: skip


def balance_layer(shapes: Sequence[StageShape], fmt: Format, machine: Machine) -> tuple[Stage, ...]:
    """Owners for the stages of a layer; the largest stage that does not write the residual does the levelling.

    Stages that write the residual stay even, so that an element of it has the same owner after each of them. Only what
    comes before the levelling stage can be made up for in it. Where a ring is full by then anyhow, nothing can.
    """
    workers = machine.workers
    free = [i for i, shape in enumerate(shapes) if shape.writes != "residual"]
    levelling = max(free, key=lambda i: _units(shapes[i]) * _unit_bytes(shapes[i], fmt))
    shares = [even_shares(_units(shape), workers) for shape in shapes]
    loads = [
        sum(shares[i][worker] * _unit_bytes(shape, fmt) for i, shape in enumerate(shapes[:levelling]))
        for worker in range(workers)
    ]
    largest = shapes[levelling]
    if machine.levels:
        shares[levelling] = levelling_shares(_units(largest), _unit_bytes(largest, fmt), loads)
    return tuple(_owned(shape, share) for shape, share in zip(shapes, shares, strict=True))


def balance_head(shape: StageShape, workers: int) -> Stage:
    return _owned(shape, even_shares(_units(shape), workers))
