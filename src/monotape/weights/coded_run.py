"""The rows of a run of tiles as codes: a rank's share, in the order of the kernels, in whole tiles and blocks."""

from __future__ import annotations

import numpy as np

from monotape.models.spec import ModelSpec
from monotape.plan.types import Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.coded import GROUPS, Coded, Plane, coded
from monotape.weights.tapes import TileRun, in_tiles, rows_of, source_of, stored_order, tensor_name


def coded_run(
    spec: ModelSpec, checkpoint: Checkpoint, stage: Stage, run: TileRun, layer: int | None,
    expert: int | None = None,
) -> Coded | None:  # fmt: skip
    """The run's rows in the format of their stage, which their matrix fits; None where it is stored as floats.

    Rows that only fill a tile, and values that only fill a block, are zeros in every plane: they stand for 0 in every
    format.
    """
    source, (start, stop) = source_of(spec, run.part.role, layer), rows_of(run)
    matrix = checkpoint.stored_matrix(tensor_name(source, layer, expert))
    if matrix is None:
        return None
    assert not source.side_by_side, f"{source.name}: lanes side by side"
    first, last, order = stored_order(spec, run.part, start, stop)
    offset = source.rows[0] if source.rows else 0
    found = coded(stage.format, matrix, offset + first, offset + last)

    def share(plane: Plane, width: int) -> Plane:
        rows = plane if order is None else np.take(plane, order, axis=0)
        if width == 0:
            return in_tiles(rows, run, 1)
        assert stage.first_k % width == 0, f"a share of {source.name} begins within a group of {width}"
        low, high = stage.first_k // width, -(-(stage.first_k + stage.k) // width)
        return in_tiles(rows[:, low:high], run, -(-stage.padded_k // width))

    return found.mapped(share, GROUPS.get(stage.format, 1))
