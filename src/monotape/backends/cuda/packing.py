"""Packs pieces of tapes from any checkpoint: rows as they are stored, or rounded, in the order that kernels want.

Weights that the file has just so take a shorter way (direct.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from monotape.backends.cuda.blocks import PACKERS, Halves, first_not_finite, to_halves
from monotape.backends.cuda.cuts import Cut
from monotape.models.spec import ModelSpec
from monotape.plan.gpu import GPU_FORMATS
from monotape.plan.types import Format, Stage
from monotape.weights.check import stored_rows
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import (
    Bytes,
    TileRun,
    in_tiles,
    part_rows,
    refuse_row,
    rows_of,
    source_of,
    tensor_name,
    tile_runs,
)

Layers: TypeAlias = Sequence[int | None]  # consecutive ones, or (None,) for the head
Pack: TypeAlias = Callable[[Layers, Bytes], None]  # fills all bytes: the same cut of each layer


class Packing(Protocol):
    """Where pieces of tapes come from."""

    @property
    def threads(self) -> int:
        """The most threads that are useful; more would only wait for each other."""
        ...

    def of_cut(self, cut: Cut) -> Pack: ...


@dataclass(frozen=True, slots=True)
class AnyPacking:
    """For every checkpoint that can be read at all."""

    spec: ModelSpec
    checkpoint: Checkpoint

    @property
    def threads(self) -> int:
        return 16

    def of_cut(self, cut: Cut) -> Pack:
        return partial(self._pack_layers, cut)

    def _pack_layers(self, cut: Cut, layers: Layers, out: Bytes) -> None:
        for layer, part in zip(layers, out.reshape(len(layers), cut.bytes), strict=True):
            self._pack(cut, layer, part)

    def _pack(self, cut: Cut, layer: int | None, out: Bytes) -> None:
        for gap in cut.gaps():
            out[gap] = 0
        for item in cut.spans:
            tile_bytes = item.stage.tile_bytes
            tiles = out[item.at : item.at + item.span.count * tile_bytes].reshape(item.span.count, tile_bytes)
            for run in tile_runs(item.stage, item.span):
                halves = self._part_halves(item.stage, run, layer)
                target = tiles[run.at : run.at + (run.count - 1) * run.step + 1 : run.step]
                PACKERS[item.stage.format](in_tiles(halves, run, item.stage.padded_k), target)

    def _part_halves(self, stage: Stage, run: TileRun, layer: int | None) -> Halves:
        """The rank's share of the rows of a run, in the format of the tapes."""
        source, part = source_of(self.spec, run.part.role, layer), run.part
        name, (start, stop) = tensor_name(source, layer), rows_of(run)
        half = GPU_FORMATS[stage.format].half
        read = partial(_stored_halves, half, self.checkpoint, name)
        halves = part_rows(self.spec, stage, part, source, read, start, stop)
        bad = first_not_finite(half, halves)
        if bad >= 0:
            first = source.rows[0] if source.rows else 0
            refuse_row(self.checkpoint, name, first + part.first + start + bad, half)
        return halves


def pack_table(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, start: int, stop: int, out: Bytes
) -> None:
    """Rows of an embedding that is no head, one after another."""
    source = source_of(spec, "embedding", None)
    read = partial(_stored_halves, fmt, checkpoint, source.name)
    halves = stored_rows(spec, "embedding", source, read, start, stop)
    bad = first_not_finite(fmt, halves)
    if bad >= 0:
        refuse_row(checkpoint, source.name, start + bad, fmt)
    out.view(np.uint16).reshape(halves.shape)[:] = halves


def _stored_halves(fmt: Format, checkpoint: Checkpoint, name: str, start: int, stop: int) -> Halves:
    """Rows as they lie in the file: its own words where it stores just those, else rounded."""
    halves = checkpoint.half_rows(name, start, stop) if checkpoint.stored_as(name) == fmt.value else None
    return to_halves(fmt, checkpoint.rows(name, start, stop)) if halves is None else halves
