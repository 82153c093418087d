"""Puts a checkpoint's tensors onto the tapes of a plan: which rows go where is decided here, how they lie in a tile is
the packer's business."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.spec import ModelSpec, TensorSource
from monotape.plan.formats import CPU_LAYOUTS, TILE_ROWS, Format
from monotape.plan.types import Part, Plan, Span, Stage
from monotape.weights.check import Reader, stored_rows
from monotape.weights.checkpoint import Checkpoint

Bytes = NDArray[np.uint8]
Number = TypeVar("Number", np.int8, np.uint8, np.uint16, np.float16, np.float32)
Word = TypeVar("Word", np.float32, np.uint16)  # what a tensor's rows are read as
Progress = Callable[[str, int, int], None]  # what, done, total

_CHUNK_VALUES = 1 << 20  # values in flight at a time and thread; bounds the memory that loading takes
_RELEASE_EVERY = 16  # pieces after which mapped pages that were read are given back


class Packer(Protocol):
    """Turns rows into tiles. Both methods return the first row that cannot be represented, or -1."""

    def pack(self, fmt: Format, rows: NDArray[np.float32], out: Bytes) -> int: ...
    def pack_integers(self, integers: NDArray[np.int8], scales: NDArray[np.float16], out: Bytes) -> int: ...


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


def load_tapes(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, packer: Packer, progress: Progress | None = None,
    *, rank_index: int = 0,
) -> list[Bytes]:  # fmt: skip
    """One array a worker, filled from the mapped file piece by piece, tensors in file order within a layer."""
    rank = plan.ranks[rank_index]
    tapes = [aligned_bytes(tape.bytes) for tape in rank.tapes]
    total, done = spec.layers + 1, 0
    with ThreadPoolExecutor(max_workers=min(4, plan.machine.workers)) as pool:
        for layer in range(spec.layers):
            for index, stage in enumerate(rank.layer_stages):
                places = [tape.layer_bytes * layer + tape.layer_segments[index].offset for tape in rank.tapes]
                _fill_stage(spec, plan, checkpoint, packer, pool, stage, layer, tapes, places)
            done += 1
            if progress:
                progress("weights", done, total)
        places = [tape.head_segment.offset for tape in rank.tapes]
        _fill_stage(spec, plan, checkpoint, packer, pool, rank.head, None, tapes, places)
        if progress:
            progress("weights", total, total)
    return tapes


def _fill_stage(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, packer: Packer, pool: ThreadPoolExecutor,
    stage: Stage, layer: int | None, tapes: list[Bytes], places: list[int],
) -> None:  # fmt: skip
    tile_bytes = stage.tile_bytes
    jobs = []
    for worker, span in enumerate(stage.spans):
        segment = tapes[worker][places[worker] : places[worker] + span.count * tile_bytes]
        tiles = segment.reshape(span.count, tile_bytes)
        for run in tile_runs(stage, span):
            for piece, out in _pieces(run, tiles, stage.padded_k):
                jobs.append(
                    pool.submit(_pack_piece, spec, stage.format, checkpoint, packer, stage, layer, piece, out)
                )
    names = [tensor_name(source_of(spec, part.role, layer), layer) for part in stage.parts]
    for done, job in enumerate(jobs, start=1):
        job.result()
        if done % _RELEASE_EVERY == 0 or done == len(jobs):
            for name in names:
                checkpoint.release(name)


def _pieces(run: TileRun, tiles: Bytes, padded_k: int) -> Iterator[tuple[TileRun, Bytes]]:
    group_tiles = -(-run.part.group // TILE_ROWS) if run.part.group != run.part.rows else 1
    whole = max(1, _CHUNK_VALUES // (padded_k * TILE_ROWS * group_tiles)) * group_tiles
    for first in range(0, run.count, whole):
        count = min(whole, run.count - first)
        at = run.at + first * run.step
        piece = TileRun(run.part, run.first_tile + first, count, at, run.step)
        yield piece, tiles[at : at + (count - 1) * run.step + 1 : run.step]


def _pack_piece(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, packer: Packer,
    stage: Stage, layer: int | None, run: TileRun, out: Bytes,
) -> None:  # fmt: skip
    source = source_of(spec, run.part.role, layer)
    name = tensor_name(source, layer)
    start, stop = rows_of(run)
    offset = (source.rows[0] if source.rows else 0) + run.part.first
    target = out if run.step == 1 else np.empty(out.shape, np.uint8)
    stored = _stored_integers(spec, checkpoint, name, stage, run, offset) if fmt is Format.Q8 else None
    if stored is not None:
        integers, scales = stored
        bad = packer.pack_integers(
            in_tiles(integers, run, integers.shape[1]), in_tiles(scales, run, scales.shape[1]), target
        )
    else:
        values = part_rows(spec, stage, run.part, source, partial(checkpoint.rows, name), start, stop)
        bad = packer.pack(fmt, in_tiles(values, run, stage.padded_k), target)
    if bad >= 0:
        refuse_row(checkpoint, name, offset + start + bad, fmt)
    if run.step != 1:
        out[:] = target


def refuse_row(checkpoint: Checkpoint, name: str, row: int, fmt: Format) -> NoReturn:
    raise CheckpointError(
        f"{checkpoint.source}: tensor {name} holds a value near row {row} that is not a finite {fmt.value} number.",
        "The file is damaged, or the weights need a wider --dtype such as bf16 or f32.",
    )


def _stored_integers(
    spec: ModelSpec, checkpoint: Checkpoint, name: str, stage: Stage, run: TileRun, offset: int
) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
    """Rows that the file itself keeps as integers, if this stage takes whole blocks of them in their order."""
    block = CPU_LAYOUTS[Format.Q8].k
    if (
        stage.k != stage.padded_k
        or stage.first_k % block
        or (spec.rope.interleaved and run.part.role in ("q", "k"))
    ):
        return None
    start, stop = rows_of(run)
    stored = checkpoint.integer_rows(name, offset + start, offset + stop)
    if stored is None:
        return None
    first, last = stage.first_k, stage.first_k + stage.k
    return stored[0][:, first:last], stored[1][:, first // block : last // block]


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


def tensor_name(source: TensorSource, layer: int | None) -> str:
    return source.name if layer is None else source.in_layer(layer)


def aligned_bytes(count: int) -> Bytes:
    """Zeroed bytes that start on a page; the system gives them only when they are touched."""
    page = 4096
    raw = np.zeros(count + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + count]
