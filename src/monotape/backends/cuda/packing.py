"""Packs pieces of tapes from any checkpoint: rows as they are stored, or rounded, in the order that kernels want.

Weights that the file has just so take a shorter way (direct.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.blocks import PACKERS, Halves, first_not_finite, to_halves
from monotape.backends.cuda.cuts import Cut, TileSpan
from monotape.backends.cuda.native_tiles import pack
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.gpu_formats import GPU_FORMATS, scale_name
from monotape.plan.types import Stage
from monotape.weights.check import stored_rows
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.coded_run import coded_run
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
Scales: TypeAlias = Mapping[str, NDArray[np.float32]]  # of rows, by the name of their vector: [layers][rows]
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
    scales: Scales = field(default_factory=dict)  # filled by packing

    @property
    def threads(self) -> int:
        return 16

    def of_cut(self, cut: Cut) -> Pack:
        return partial(self._pack_layers, cut)

    def _pack_layers(self, cut: Cut, layers: Layers, out: Bytes) -> None:
        for layer, part in zip(layers, out.reshape(len(layers), cut.bytes), strict=True):
            self._pack(cut, layer, part)

    def pack_expert(self, cut: Cut, layer: int, expert: int, out: Bytes) -> None:
        self._pack(cut, layer, out, expert)

    def _pack(self, cut: Cut, layer: int | None, out: Bytes, expert: int | None = None) -> None:
        for gap in cut.gaps():
            out[gap] = 0
        for item in cut.spans:
            tile_bytes = item.stage.tile_bytes
            tiles = out[item.at : item.at + item.span.count * tile_bytes].reshape(item.span.count, tile_bytes)
            for run in tile_runs(item.stage, item.span):
                target = tiles[run.at : run.at + (run.count - 1) * run.step + 1 : run.step]
                if item.stage.format in PACKERS:
                    halves = self._part_halves(item.stage, run, layer, expert)
                    PACKERS[item.stage.format](in_tiles(halves, run, item.stage.padded_k), target)
                else:
                    scales = self._scales_of(item, run, layer, expert)
                    self._pack_coded(item.stage, run, layer, target, scales, expert)

    def _scales_of(
        self, item: TileSpan, run: TileRun, layer: int | None, expert: int | None
    ) -> NDArray[np.float32] | None:
        """The places of the scales of a run's rows, [tiles][rows of a tile], where the format has such scales."""
        if not item.stage.layout.row_scales:
            return None
        of_layer = self.scales[scale_name(item.stage)][layer or 0]
        scales: NDArray[np.float32] = of_layer if expert is None else of_layer[expert]
        scales = scales.reshape(-1, TILE_ROWS)
        return scales[item.span.first :][run.at :: run.step][: run.count]

    def _pack_coded(
        self, stage: Stage, run: TileRun, layer: int | None, out: Bytes, scales: NDArray[np.float32] | None,
        expert: int | None,
    ) -> None:  # fmt: skip
        """Rows as they are stored: codes, and the numbers of their groups."""
        coded = coded_run(self.spec, self.checkpoint, stage, run, layer, expert)
        assert coded is not None, f"{run.part.role} is stored as floats, and {stage.format.value} is wanted"
        pack(stage.format, coded, out)
        if scales is not None:
            assert coded.row_scales is not None, f"scales of {run.part.role}"
            scales[:] = coded.row_scales.reshape(-1, TILE_ROWS)

    def _part_halves(self, stage: Stage, run: TileRun, layer: int | None, expert: int | None) -> Halves:
        """The rank's share of the rows of a run, in the format of the tapes."""
        source, part = source_of(self.spec, run.part.role, layer), run.part
        name, (start, stop) = tensor_name(source, layer, expert), rows_of(run)
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
