"""Fills tapes from a checkpoint, piece by piece on all cores. How rows lie in a tile is the packer's business."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from monotape.models.spec import ModelSpec, TensorSource
from monotape.plan.formats import CPU_LAYOUTS, TILE_ROWS, Format
from monotape.plan.types import Plan, Span, Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.coded import GROUPS, Coded, Plane, coded
from monotape.weights.coded_run import coded_run
from monotape.weights.raw import RawMatrix
from monotape.weights.tapes import (
    Bytes,
    Progress,
    TileRun,
    aligned_bytes,
    in_tiles,
    part_rows,
    refuse_row,
    rows_of,
    source_of,
    stored_order,
    tensor_name,
    tile_runs,
)

_CHUNK_VALUES = 1 << 20  # values in flight at a time and thread; bounds the memory that loading takes
_RELEASE_EVERY = 16  # pieces after which mapped pages that were read are given back
_ROUNDED = (Format.F32, Format.F16, Format.BF16, Format.Q8)


def holds_codes(fmt: Format) -> bool:
    """Is the format one of stored codes alone? Any number can be rounded to the others."""
    return fmt not in _ROUNDED


class Packer(Protocol):
    """Turns rows into tiles. All methods return the first row that cannot be represented, or -1."""

    def pack(self, fmt: Format, rows: NDArray[np.float32], out: Bytes) -> int: ...
    def pack_integers(self, integers: NDArray[np.int8], scales: NDArray[np.float16], out: Bytes) -> int: ...
    def pack_coded(self, fmt: Format, rows: Coded, out: Bytes) -> int: ...
    def reads_raw(self, fmt: Format, kind: str) -> bool:
        """Can it pack such blocks of a mapped file?"""
        ...

    def pack_raw(
        self,
        fmt: Format,
        raw: RawMatrix,
        order: NDArray[np.int64],
        columns: tuple[int, int],
        padded_k: int,
        out: Bytes,
    ) -> int: ...


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
            for index, stage in enumerate(rank.taped_stages):
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


def load_library(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, packer: Packer, progress: Progress | None = None,
    *, rank_index: int = 0,
) -> Bytes:  # fmt: skip
    """The tiles of all experts, filled layer by layer."""
    rank = plan.ranks[rank_index]
    library = rank.library
    assert library is not None, "a model without experts"
    found = aligned_bytes(library.bytes)
    with ThreadPoolExecutor(max_workers=min(4, plan.machine.workers)) as pool:
        for layer in range(spec.layers):
            for expert in range(library.experts):
                for stage in rank.routed_stages:
                    first = library.address(layer, expert, stage.name)
                    tiles = found[first : first + stage.tiles * stage.tile_bytes].reshape(stage.tiles, -1)
                    jobs = _pack_span(
                        spec, checkpoint, packer, pool, stage, layer, Span(0, stage.tiles), tiles, expert
                    )
                    _finish(spec, checkpoint, stage, layer, jobs, expert)
            if progress:
                progress("experts", layer + 1, spec.layers)
    return found


def _fill_stage(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, packer: Packer, pool: ThreadPoolExecutor,
    stage: Stage, layer: int | None, tapes: list[Bytes], places: list[int],
) -> None:  # fmt: skip
    tile_bytes = stage.tile_bytes
    jobs: list[Future[None]] = []
    for worker, span in enumerate(stage.spans):
        segment = tapes[worker][places[worker] : places[worker] + span.count * tile_bytes]
        tiles = segment.reshape(span.count, tile_bytes)
        jobs += _pack_span(spec, checkpoint, packer, pool, stage, layer, span, tiles)
    _finish(spec, checkpoint, stage, layer, jobs)


def _pack_span(
    spec: ModelSpec, checkpoint: Checkpoint, packer: Packer, pool: ThreadPoolExecutor, stage: Stage, layer: int | None,
    span: Span, tiles: Bytes, expert: int | None = None,
) -> list[Future[None]]:  # fmt: skip
    return [
        pool.submit(_pack_piece, spec, stage.format, checkpoint, packer, stage, layer, piece, out, expert)
        for run in tile_runs(stage, span)
        for piece, out in _pieces(run, tiles, stage.padded_k)
    ]


def _finish(
    spec: ModelSpec, checkpoint: Checkpoint, stage: Stage, layer: int | None, jobs: list[Future[None]],
    expert: int | None = None,
) -> None:  # fmt: skip
    names = [tensor_name(source_of(spec, part.role, layer), layer, expert) for part in stage.parts]
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
    stage: Stage, layer: int | None, run: TileRun, out: Bytes, expert: int | None = None,
) -> None:  # fmt: skip
    source = source_of(spec, run.part.role, layer)
    name = tensor_name(source, layer, expert)
    start, stop = rows_of(run)
    offset = (source.rows[0] if source.rows else 0) + run.part.first
    target = out if run.step == 1 else np.empty(out.shape, np.uint8)
    raw = _raw_matrix(checkpoint, name, source, stage, packer)
    stored = (
        _stored_integers(spec, checkpoint, name, stage, run, offset) if fmt is Format.Q8 and not raw else None
    )
    if raw is not None:
        order = _raw_order(spec, raw, source, run)
        columns = (stage.first_k, stage.first_k + stage.k)
        bad = packer.pack_raw(fmt, raw, order, columns, stage.padded_k, target)
        bad = bad if bad < 0 else int((order[: bad + 1] >= 0).sum()) - 1
    elif holds_codes(fmt):
        coded = coded_run(spec, checkpoint, stage, run, layer, expert)
        assert coded is not None, f"{name} is not stored as codes"
        bad = packer.pack_coded(fmt, coded, target)
    elif stored is not None:
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


def _raw_matrix(
    checkpoint: Checkpoint, name: str, source: TensorSource, stage: Stage, packer: Packer
) -> RawMatrix | None:
    """The tensor as it lies in the file, if the packer reads that."""
    raw = checkpoint.raw_matrix(name)
    if (
        raw is None
        or not packer.reads_raw(stage.format, raw.kind)
        or stage.first_k % min(128, stage.layout.k)
    ):
        return None
    return None if source.side_by_side else raw


def _raw_order(spec: ModelSpec, raw: RawMatrix, source: TensorSource, run: TileRun) -> NDArray[np.int64]:
    """For each row of a run's tiles the row of the file; -1 for rows that only fill a tile."""
    first, last, order = stored_order(spec, run.part, *rows_of(run))
    rows = np.arange(first, last) + (source.rows[0] if source.rows else 0)
    if order is not None:
        rows = rows[order]
    if dim := raw.head_dim:  # halves of a head lie one value after another
        within = rows % dim
        rows = rows - within + 2 * (within % (dim // 2)) + within // (dim // 2)
    return in_tiles(rows[:, None] + 1, run, 1)[:, 0] - 1


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


def pack_vocabulary(
    spec: ModelSpec, fmt: Format, padded_k: int, checkpoint: Checkpoint, packer: Packer, out: Bytes
) -> None:
    """An embedding that is no part of a tape, as tiles: [tiles, bytes]."""
    name = source_of(spec, "embedding", None).name
    step = max(1, _CHUNK_VALUES // (TILE_ROWS * padded_k))
    with ThreadPoolExecutor(max_workers=4) as pool:
        jobs = [
            pool.submit(
                _pack_words, spec, fmt, padded_k, checkpoint, packer, first, out[first : first + step]
            )
            for first in range(0, len(out), step)
        ]
        for done, job in enumerate(jobs, start=1):
            job.result()
            if done % _RELEASE_EVERY == 0 or done == len(jobs):
                checkpoint.release(name)


def _pack_words(
    spec: ModelSpec,
    fmt: Format,
    padded_k: int,
    checkpoint: Checkpoint,
    packer: Packer,
    first: int,
    out: Bytes,
) -> None:
    name = source_of(spec, "embedding", None).name
    start, stop = first * TILE_ROWS, min(spec.vocab, (first + len(out)) * TILE_ROWS)
    if holds_codes(fmt):
        matrix = checkpoint.stored_matrix(name)
        assert matrix is not None, f"{name} is not stored as codes"
        found = coded(fmt, matrix, start, stop)

        def whole(plane: Plane, width: int) -> Plane:
            shape = (len(out) * TILE_ROWS, -(-padded_k // width) if width else 1)
            padded = np.zeros(shape, plane.dtype)
            padded[: len(plane), : plane.shape[1]] = plane
            return padded

        bad = packer.pack_coded(fmt, found.mapped(whole, GROUPS.get(fmt, 1)), out)
    else:
        rows = np.zeros((len(out) * TILE_ROWS, padded_k), np.float32)
        rows[: stop - start, : spec.width] = checkpoint.rows(name, start, stop)
        bad = packer.pack(fmt, rows, out)
    if bad >= 0:
        refuse_row(checkpoint, name, start + bad, fmt)
