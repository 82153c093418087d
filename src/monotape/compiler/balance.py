"""Second pass: assigns tiles to workers, so that every worker reads the same number of bytes in a layer.

Each stage is dealt out evenly in whole units. The largest stage, whose units are many and small, evens out the
remainders. A single stage may be lopsided: only the sum over a layer costs time, because a worker that finishes a
stage early goes on with its tape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from monotape.compiler.stages import StageShape
from monotape.plan.types import Machine, Span, Stage


def _units(shape: StageShape) -> int:
    return max(1, shape.dealt) * shape.tiles // shape.unit


def even_shares(units: int, workers: int) -> list[int]:
    """Units per worker, spread so that no two neighbours differ by more than one."""
    bounds = [units * worker // workers for worker in range(workers + 1)]
    return [end - start for start, end in pairwise(bounds)]


def levelling_shares(units: int, unit_bytes: int, loads: Sequence[int]) -> list[int]:
    """Units per worker that level `loads`, the bytes that workers already have, as far as whole units can."""
    level = (sum(loads) + units * unit_bytes) / len(loads)
    wanted = [max(0.0, (level - load) / unit_bytes) for load in loads]
    scale = units / sum(wanted)  # > 1 only if some worker is above the level already
    shares, given, due = [], 0, 0.0
    for want in wanted:
        due += want * scale
        shares.append(round(due) - given)
        given += shares[-1]
    shares[-1] += units - given
    return shares


def dealt_shares(units: int, loads: Sequence[int]) -> list[int]:
    """Units per worker that differ by at most one; remainders go to the least-loaded workers."""
    even = even_shares(units, len(loads))
    shares = [units // len(loads)] * len(loads)
    lightest = sorted(range(len(loads)), key=lambda worker: (loads[worker], -even[worker]))
    for worker in lightest[: units % len(loads)]:
        shares[worker] += 1
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
        format=shape.format, layout=shape.layout, first_k=shape.first_k, gain=shape.gain, bias=shape.bias,
        routed=shape.routed, dealt=shape.dealt,
    )  # fmt: skip


def balance_layer(shapes: Sequence[StageShape], machine: Machine) -> tuple[Stage, ...]:
    """Owners for the stages of a layer.

    Stages that write the residual have the same spans, so that an element has the same owner after each of them. On a
    machine that levels, the largest other stage makes up for the stages before it. On one where every stage waits for
    the slowest worker, spans differ by one unit at most, and remainders go to the least-loaded worker.
    """
    workers = machine.workers
    free = [i for i, shape in enumerate(shapes) if shape.writes != "residual"]
    largest_first = sorted(free, key=lambda i: -_units(shapes[i]) * shapes[i].unit_bytes)
    shares = [even_shares(_units(shape), workers) for shape in shapes]

    def loads(stages: Iterable[int]) -> list[int]:
        sizes = {i: shapes[i].unit_bytes for i in stages}
        return [sum(shares[i][worker] * size for i, size in sizes.items()) for worker in range(workers)]

    if machine.levels:
        largest = largest_first[0]
        units, unit_bytes = _units(shapes[largest]), shapes[largest].unit_bytes
        shares[largest] = levelling_shares(units, unit_bytes, loads(range(largest)))
    else:
        dealt = [i for i in range(len(shapes)) if i not in free]
        for i in largest_first:
            shares[i] = dealt_shares(_units(shapes[i]), loads(dealt))
            dealt.append(i)
    return tuple(_owned(shape, share) for shape, share in zip(shapes, shares, strict=True))


def balance_head(shape: StageShape, workers: int) -> Stage:
    return _owned(shape, even_shares(_units(shape), workers))
