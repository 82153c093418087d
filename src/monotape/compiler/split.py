"""Pass zero: the heads, columns and vocabulary of each rank, or a sentence why the model cannot be shared."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from monotape.errors import UsageError
from monotape.models.lanes import Lanes, tensor_parallel, uneven_heads
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS

MAX_RANKS = 64
_COLUMN_UNIT = 32  # values that share a scale in 8-bit formats, and that tensor cores take at a time


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of every matrix: [first, end) of each dimension that ranks share."""

    rank: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]  # with fewer KV heads than ranks, several ranks have the same one
    ffn: tuple[int, int]
    vocab: tuple[int, int]


def lanes_for(spec: ModelSpec, ranks: int | None) -> Lanes:
    """The communication between the ranks of this model. None: as many ranks as the model has lanes, else one."""
    if spec.lanes is None:
        return tensor_parallel(ranks or 1)
    if ranks not in (None, spec.lanes.count):
        lanes = f"{spec.lanes.count} lanes" if spec.lanes.count > 1 else "one lane"
        raise UsageError(
            f"{ranks} ranks were asked for, but this model has {lanes}, one a rank.",
            f"Use --tp {spec.lanes.count}, or leave it out.",
        )
    return spec.lanes


def shares(spec: ModelSpec, ranks: int) -> tuple[Share, ...]:
    """The share of each rank. Heads must divide; columns and vocabulary may be uneven by one unit."""
    if ranks not in possible_ranks(spec):
        known = ", ".join(map(str, possible_ranks(spec)))
        raise UsageError(f"{_obstacle(spec, ranks)}.", f"For this model --tp can be {known}.")
    heads = _even(spec.heads, ranks, 1)
    group = spec.heads // spec.kv_heads
    # The model itself decides which columns and which part of the vocabulary belong to a lane.
    free = spec.lanes is None
    columns = _even(spec.ffn, ranks, _unit(spec.ffn, ranks, _COLUMN_UNIT) if free else 1)
    words = _even(spec.vocab, ranks, 1 if spec.lanes and spec.lanes.head == "vocabulary" else TILE_ROWS)
    return tuple(
        Share(rank, own, (own[0] // group, (own[1] - 1) // group + 1), columns[rank], words[rank])
        for rank, own in enumerate(heads)
    )


def possible_ranks(spec: ModelSpec) -> tuple[int, ...]:
    """Every number of ranks that can share this model."""
    return tuple(ranks for ranks in range(1, MAX_RANKS + 1) if not _obstacle(spec, ranks))


def _obstacle(spec: ModelSpec, ranks: int) -> str:
    """Why `ranks` ranks cannot share the model; empty if they can."""
    if not 1 <= ranks <= MAX_RANKS:
        return f"{ranks} ranks cannot be"
    if uneven := uneven_heads(spec.heads, spec.kv_heads, ranks):
        return f"{ranks} ranks cannot share {uneven}"
    if spec.ffn < ranks or -(-spec.vocab // TILE_ROWS) < ranks:
        return f"{ranks} ranks are more than {spec.ffn} columns or {spec.vocab} words can be shared among"
    return ""


def _unit(size: int, ranks: int, preferred: int) -> int:
    """The preferred unit where every rank gets one, else tiles, else single columns."""
    return next(unit for unit in (preferred, TILE_ROWS, 1) if size // unit >= ranks)


def _even(size: int, ranks: int, unit: int) -> list[tuple[int, int]]:
    units = -(-size // unit)
    bounds = [min(size, units * rank // ranks * unit) for rank in range(ranks + 1)]
    return list(pairwise(bounds))
