"""Experts on the GPU: the pieces of their library, and the biases of their rows in the order of its tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.cuts import expert_cuts
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.cuda.packing import AnyPacking, Scales
from monotape.backends.cuda.staging import SLOT_BYTES, Piece
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS
from monotape.plan.types import Plan, RankPlan, Span, Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import tile_runs

Floats = NDArray[np.float32]


def library_pieces(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, tapes: DeviceMemory, scales: Scales
) -> Iterator[tuple[int, Piece]]:
    """Expert after expert, behind the tapes, with the layer of each piece."""
    library = plan.ranks[0].library
    if library is None:
        return
    packing = AnyPacking(spec, checkpoint, scales)
    cuts = expert_cuts(plan, SLOT_BYTES)
    for layer in range(library.layers):
        for expert in range(library.experts):
            start = plan.tape_bytes + (layer * library.experts + expert) * library.expert_bytes
            for cut in cuts:
                pack = partial(packing.pack_expert, cut, layer, expert)
                yield layer, Piece(tapes, start + cut.first, cut.bytes, pack)


def stage_biases(
    rank: RankPlan, small: Mapping[str, NDArray[Any]], experts: int, layers: int
) -> dict[str, Floats]:
    """By a stage's name of it: [layers][experts, where it is routed][rows, each tile padded].

    A rank that does not add a bias, because another does, has zeros. That of q, k and v is as it was read.
    """
    found = {}
    for stage in rank.layer_stages:
        if stage.bias and stage.bias != "qkv_bias":
            found[stage.bias] = _in_tiles(stage, small, layers * (experts if stage.routed else 1))
    return found


def _in_tiles(stage: Stage, small: Mapping[str, NDArray[Any]], matrices: int) -> Floats:
    values = np.zeros((matrices, stage.tiles, TILE_ROWS), np.float32)
    for run in tile_runs(stage, Span(0, stage.tiles)):
        rows = small.get(f"{run.part.role}_bias")
        if rows is None:
            continue
        padded = np.zeros((matrices, run.count * TILE_ROWS), np.float32)
        padded[:, : run.part.rows] = rows.reshape(matrices, run.part.rows)
        values[:, run.at :: run.step][:, : run.count] = padded.reshape(matrices, run.count, TILE_ROWS)
    return values
