"""Streams a checkpoint onto the GPU as tapes. No tape ever exists on the host: threads pack pieces of them from the
mapped file straight into pinned memory, from which they are copied (see staging.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.blocks import Halves, first_not_finite, pack_blocks, to_halves
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.cuda.rank_view import reads_table
from monotape.backends.cuda.staging import SLOT_BYTES, Piece, Staging
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec
from monotape.plan.types import Format, Plan, Span, Stage
from monotape.weights.check import stored_rows
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.small import small_tensors
from monotape.weights.tapes import (
    Bytes,
    Progress,
    TileRun,
    in_tiles,
    part_rows,
    refuse_row,
    rows_of,
    source_of,
    tensor_name,
    tile_runs,
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything of a model that lies on the GPU, by the name under which the kernel's parameters know it.

    tapes, tape_start and layer_bytes; attention_norm, ffn_norm, final_norm and, where the model has them, qkv_bias,
    q_norm and k_norm (float32); cosines, sines and windows; embedding ([vocab][width] halves) where it is a table.
    """

    memories: Mapping[str, DeviceMemory]

    @property
    def bytes(self) -> int:
        return sum(memory.bytes for memory in self.memories.values())


@dataclass(frozen=True, slots=True)
class TileSpan:
    """Consecutive tiles of one stage, and where they go in their piece."""

    stage: Stage
    span: Span
    at: int  # byte of the piece


def load_model(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None,
    shared: Mapping[str, DeviceMemory] | None = None,
) -> LoadedModel:  # fmt: skip
    """Loads all of a model, or what a rank has of it (see rank_view.py). What it takes is what `memory_plan` said.

    `shared` has what another rank on the same GPU has loaded already.
    """
    assert plan.format in (Format.BF16, Format.F16), f"{plan.format} is no format of the GPU's tapes"
    assert len(plan.ranks) == 1, "a GPU is one rank"
    memories = {"tapes": DeviceMemory(plan.tape_bytes)}
    shared = shared or {}
    if reads_table(spec, plan) and "embedding" not in shared:
        memories["embedding"] = DeviceMemory(2 * spec.vocab * spec.width)
    try:
        with Staging() as staging:
            small = staging.run(partial(_small_arrays, spec, plan, checkpoint))
            _move_weights(spec, plan, checkpoint, staging, memories, progress)
            small_arrays = {name: array for name, array in small.result().items() if name not in shared}
            memories |= {name: DeviceMemory.of(array) for name, array in small_arrays.items()}
    except BaseException:
        for memory in memories.values():
            memory.close()  # the exception's traceback would keep them for as long as somebody looks at it
        raise
    return LoadedModel({**memories, **shared})


def _move_weights(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, staging: Staging,
    memories: Mapping[str, DeviceMemory], progress: Progress | None,
) -> None:  # fmt: skip
    pieces = list(tape_pieces(spec, plan, checkpoint, memories["tapes"]))
    if "embedding" in memories:
        table = table_pieces(spec, plan.format, checkpoint, memories["embedding"])
        pieces += [(None, piece) for piece in table]
    before: int | None = 0
    for done in staging.move([piece for _, piece in pieces]):
        layer = pieces[done - 1][0]
        if layer != before:
            _release(spec, plan, checkpoint, before)
            before = layer
        if progress:
            progress("weights", done, len(pieces))
    _release(spec, plan, checkpoint, None)


def tape_pieces(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, tapes: DeviceMemory
) -> Iterator[tuple[int | None, Piece]]:
    """All tapes, layer after layer and worker after worker, then the heads (layer None): the order of the file."""
    rank = plan.ranks[0]
    starts = np.cumsum([0, *(tape.bytes for tape in rank.tapes)]).tolist()
    layers, heads = [], []  # how a worker's tape is cut, the same in every layer
    for tape in rank.tapes:
        offsets = [segment.offset for segment in tape.layer_segments]
        stages = zip(rank.layer_stages, offsets, strict=True)
        spans = [TileSpan(stage, stage.spans[tape.worker], offset) for stage, offset in stages]
        layers.append(list(_cut(plan, spans, tape.layer_bytes)))
        head = [TileSpan(rank.head, rank.head.spans[tape.worker], 0)]
        heads.append(list(_cut(plan, head, tape.bytes - tape.head_segment.offset)))
    for layer in (*range(spec.layers), None):
        for tape, start, cuts in zip(rank.tapes, starts, heads if layer is None else layers, strict=False):
            base = start + (tape.head_segment.offset if layer is None else layer * tape.layer_bytes)
            for first, length, group in cuts:
                pack = partial(_pack_spans, spec, plan.format, checkpoint, layer, group)
                yield layer, Piece(tapes, base + first, length, pack)


def _cut(plan: Plan, spans: list[TileSpan], total: int) -> Iterator[tuple[int, int, tuple[TileSpan, ...]]]:
    """Spans that follow each other to groups of at most SLOT_BYTES: (first byte, bytes, spans of the group).

    What alignment leaves free behind a stage belongs to the piece before it.
    """
    chunks: list[TileSpan] = []
    for item in spans:
        tile_bytes = plan.format.tile_bytes(item.stage.padded_k)
        unit = item.stage.unit
        most = max(unit, (SLOT_BYTES - plan.machine.alignment) // tile_bytes // unit * unit)
        for first in range(0, item.span.count, most):
            span = Span(item.span.first + first, min(most, item.span.count - first))
            chunks.append(TileSpan(item.stage, span, item.at + first * tile_bytes))
    ends = [chunk.at for chunk in chunks[1:]] + [total]
    group: list[TileSpan] = []
    for chunk, end in zip(chunks, ends[: len(chunks)], strict=True):
        if group and end - group[0].at > SLOT_BYTES:
            yield _group(group, chunk.at)
            group = []
        group.append(chunk)
    if group:
        yield _group(group, total)


def _group(group: list[TileSpan], end: int) -> tuple[int, int, tuple[TileSpan, ...]]:
    first = group[0].at
    moved = tuple(TileSpan(item.stage, item.span, item.at - first) for item in group)
    return first, end - first, moved


def _pack_spans(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, layer: int | None, spans: tuple[TileSpan, ...], out: Bytes
) -> None:  # fmt: skip
    end = 0
    for item in spans:
        tile_bytes = fmt.tile_bytes(item.stage.padded_k)
        out[end : item.at] = 0  # what alignment leaves free
        end = item.at + item.span.count * tile_bytes
        tiles = out[item.at : end].reshape(item.span.count, tile_bytes)
        for run in tile_runs(item.stage, item.span):
            halves = _part_halves(spec, fmt, checkpoint, item.stage, run, layer)
            target = tiles[run.at : run.at + (run.count - 1) * run.step + 1 : run.step]
            pack_blocks(in_tiles(halves, run, item.stage.padded_k), target)
    out[end:] = 0


def _part_halves(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, stage: Stage, run: TileRun, layer: int | None
) -> Halves:
    """What the rank has of the rows of a run, in the format of the tapes."""
    source, part = source_of(spec, run.part.role, layer), run.part
    name, (start, stop) = tensor_name(source, layer), rows_of(run)
    halves = part_rows(spec, stage, part, source, partial(_stored_halves, fmt, checkpoint, name), start, stop)
    bad = first_not_finite(fmt, halves)
    if bad >= 0:
        first = source.rows[0] if source.rows else 0
        refuse_row(checkpoint, name, first + part.first + start + bad, fmt)
    return halves


def _stored_halves(fmt: Format, checkpoint: Checkpoint, name: str, start: int, stop: int) -> Halves:
    """Rows as they lie in the file: its own words where it stores just those, else rounded."""
    halves = checkpoint.half_rows(name, start, stop) if checkpoint.stored_as(name) == fmt.value else None
    return to_halves(fmt, checkpoint.rows(name, start, stop)) if halves is None else halves


def table_pieces(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, table: DeviceMemory
) -> Iterator[Piece]:
    """An embedding that is no head: row after row."""
    row_bytes = 2 * spec.width
    most = max(1, SLOT_BYTES // row_bytes)

    source = source_of(spec, "embedding", None)
    stored = partial(_stored_halves, fmt, checkpoint, source.name)

    def pack(start: int, stop: int, out: Bytes) -> None:
        halves = stored_rows(spec, "embedding", source, stored, start, stop)
        bad = first_not_finite(fmt, halves)
        if bad >= 0:
            refuse_row(checkpoint, source.name, start + bad, fmt)
        out.view(np.uint16).reshape(halves.shape)[:] = halves

    for start in range(0, spec.vocab, most):
        stop = min(spec.vocab, start + most)
        yield Piece(table, start * row_bytes, (stop - start) * row_bytes, partial(pack, start, stop))


def _small_arrays(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """What everybody reads: where the tapes start, norms and biases, positions, windows."""
    tapes = plan.ranks[0].tapes
    cosines, sines = position_tables(spec.rope, plan.context)
    return {
        "tape_start": np.cumsum([0, *(tape.bytes for tape in tapes[:-1])], dtype=np.int64),
        "layer_bytes": np.array([tape.layer_bytes for tape in tapes], np.int64),
        **small_tensors(spec, checkpoint, plan.ranks[0]),
        "cosines": cosines,
        "sines": sines,
        "windows": np.array([window or 0 for window in spec.windows], np.int32),
    }


def _release(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, layer: int | None) -> None:
    """The mapped pages of a layer have been read."""
    rank = plan.ranks[0]
    stages = (rank.head,) if layer is None else rank.layer_stages
    roles = [part.role for stage in stages for part in stage.parts]
    if layer is None and reads_table(spec, plan):
        roles.append("embedding")
    for name in {tensor_name(source_of(spec, role, layer), layer) for role in roles}:
        checkpoint.release(name)
