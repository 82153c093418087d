"""Which rows of a checkpoint's tensors go where on the tapes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.spec import ModelSpec, TensorSource
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.types import Part, Span, Stage
from monotape.weights.check import Reader, stored_rows
from monotape.weights.checkpoint import Checkpoint

Bytes = NDArray[np.uint8]
Number = TypeVar("Number", np.int8, np.uint8, np.uint16, np.int64, np.float16, np.float32)
Word = TypeVar("Word", np.float32, np.uint16)  # what a tensor's rows are read as
Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True)
class TileRun:
    """Consecutive tiles of one part, and where they go among the tiles of their worker's segment."""

    part: Part
    first_tile: int  # within the part
    count: int
    at: int  # tile of the segment
    step: int  # 2 where tiles of two parts alternate


def tile_runs(stage: Stage, span: Span) -> Iterator[TileRun]:
    """The runs that make up one worker's span of a stage."""
    if stage.interleaved:
        pairs = Span(span.first // 2, span.count // 2)
        for index, part in enumerate(stage.parts):
            yield TileRun(part, pairs.first, pairs.count, index, 2)
        return
    start = 0
    for part in stage.parts:
        first, end = max(span.first, start), min(span.end, start + part.tiles)
        if first < end:
            yield TileRun(part, first - start, end - first, first - span.first, 1)
        start += part.tiles


def refuse_row(checkpoint: Checkpoint, name: str, row: int, fmt: Format) -> NoReturn:
    raise CheckpointError(
        f"{checkpoint.source}: tensor {name} holds a value near row {row} that is not a finite {fmt.value} number.",
        "The file is damaged, or the weights need a wider --dtype such as bf16 or f32.",
    )


def part_rows(
    spec: ModelSpec, stage: Stage, part: Part, source: TensorSource, read: Reader[Word], start: int, stop: int
) -> NDArray[Word]:
    """Rows start..stop of a rank's part: the columns that its stage takes, heads in the order of the kernels.

    `read` reads rows of the part's tensor as they lie in the file, in whatever type.
    """
    columns = (stage.first_k, stage.first_k + stage.k)
    first, last, order = stored_order(spec, part, start, stop)
    found = stored_rows(spec, part.role, source, read, first, last, columns)
    return found if order is None else np.take(found, order, axis=0)


def stored_order(
    spec: ModelSpec, part: Part, start: int, stop: int
) -> tuple[int, int, NDArray[np.int64] | None]:
    """The rows of a part's tensor to read for its rows start..stop, and which of them those are, one after another.

    None: they are all of them, in order.
    """
    start, stop = part.first + start, part.first + stop
    if not (spec.rope.interleaved and part.role in ("q", "k")):
        return start, stop, None
    # Kernels rotate (i, i + half). A head whose pairs are (2 i, 2 i + 1) is that head with its rows in another order,
    # and a product of q and k does not notice when both change theirs.
    dim, turning = spec.head_dim, spec.rope.dims
    order = np.concatenate((np.arange(0, turning, 2), np.arange(1, turning, 2), np.arange(turning, dim)))
    rows = np.arange(start, stop)
    sources = rows // dim * dim + order[rows % dim]
    first, last = start // dim * dim, -(-stop // dim) * dim
    return first, last, sources - first


def rows_of(run: TileRun) -> tuple[int, int]:
    """The rows of its tensor that a run holds."""
    part = run.part
    if part.group == part.rows:
        return run.first_tile * TILE_ROWS, min(part.rows, (run.first_tile + run.count) * TILE_ROWS)
    group_tiles = -(-part.group // TILE_ROWS)
    return run.first_tile // group_tiles * part.group, (
        run.first_tile + run.count
    ) // group_tiles * part.group


def in_tiles(values: NDArray[Number], run: TileRun, k: int) -> NDArray[Number]:
    """Rows padded so that every group fills whole tiles, and columns padded to k, with zeros."""
    rows, columns = values.shape
    if columns == k and rows == run.count * TILE_ROWS:
        return np.ascontiguousarray(values)
    group = run.part.group if run.part.group != run.part.rows else rows
    groups = max(1, rows // group)
    padded = np.zeros((groups, run.count * TILE_ROWS // groups, k), values.dtype)
    padded[:, :group, :columns] = values.reshape(groups, group, columns)
    return padded.reshape(run.count * TILE_ROWS, k)


def source_of(spec: ModelSpec, role: str, layer: int | None) -> TensorSource:
    return spec.model_tensors[role] if layer is None else spec.layer_tensors[role]


def tensor_name(source: TensorSource, layer: int | None, expert: int | None = None) -> str:
    return source.name if layer is None else source.in_layer(layer, expert)


def aligned_bytes(count: int) -> Bytes:
    """Zeroed bytes that start on a page; the system gives them only when they are touched."""
    page = 4096
    raw = np.zeros(count + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + count]
