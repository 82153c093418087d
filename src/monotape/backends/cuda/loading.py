"""Streams a checkpoint onto the GPU as tapes. No tape ever exists on the host: threads pack pieces of them from the
mapped file straight into pinned memory, from which they are copied (see staging.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.cuts import head_cuts, layer_cuts, layer_groups
from monotape.backends.cuda.direct import packing_for
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.cuda.experts import library_pieces, stage_biases
from monotape.backends.cuda.packing import Layers, Packing, Scales
from monotape.backends.cuda.rank_view import reads_table
from monotape.backends.cuda.staging import SLOT_BYTES, Piece, Staging
from monotape.backends.cuda.stored import pack_table
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.gpu_formats import GPU_FORMATS, scale_name
from monotape.plan.types import Plan, Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.small import small_tensors
from monotape.weights.tapes import Progress, source_of, tensor_name

HEAD: Layers = (None,)


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


def load_model(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None,
    shared: Mapping[str, DeviceMemory] | None = None,
) -> LoadedModel:  # fmt: skip
    """Loads all of a model, or what a rank has of it (see rank_view.py). What it takes is what `memory_plan` said.

    `shared` has what another rank on the same GPU has loaded already.
    """
    assert all(stage.format in GPU_FORMATS for stage in plan.ranks[0].stages), "formats of a GPU's tapes"
    assert len(plan.ranks) == 1, "a GPU is one rank"
    library = plan.ranks[0].library
    memories = {"tapes": DeviceMemory(plan.tape_bytes + (library.bytes if library else 0))}
    shared = shared or {}
    if reads_table(spec, plan) and "embedding" not in shared:
        memories["embedding"] = DeviceMemory(2 * spec.vocab * spec.width)
    try:
        scales = _empty_scales(plan)
        pieces, threads = all_pieces(spec, plan, checkpoint, memories, scales)
        with Staging(threads) as staging:
            small = staging.run(partial(_small_arrays, spec, plan, checkpoint))
            _move_weights(spec, plan, checkpoint, staging, pieces, progress)
            small_arrays = {name: array for name, array in small.result().items() if name not in shared}
            memories |= {name: DeviceMemory.of(array) for name, array in {**small_arrays, **scales}.items()}
    except BaseException:
        for memory in memories.values():
            memory.close()  # the exception's traceback would keep them alive
        raise
    return LoadedModel({**memories, **shared})


def _move_weights(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, staging: Staging, pieces: Sequence[tuple[Layers, Piece]],
    progress: Progress | None,
) -> None:  # fmt: skip
    """Copies all pieces, and releases the file's pages that have been read."""
    before = pieces[0][0]
    for done in staging.move([piece for _, piece in pieces]):
        layers = pieces[done - 1][0]
        if layers != before:
            _release(spec, plan, checkpoint, before)
            before = layers
        if progress:
            progress("weights", done, len(pieces))
    _release(spec, plan, checkpoint, before)


def all_pieces(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, memories: Mapping[str, DeviceMemory], scales: Scales
) -> tuple[list[tuple[Layers, Piece]], int]:
    """The pieces to copy, in the order of the file, and how many threads are useful."""
    rank = plan.ranks[0]
    of_layers = packing_for(spec, checkpoint, rank.taped_stages, range(spec.layers), scales)
    of_heads = packing_for(spec, checkpoint, (rank.head,), HEAD, scales)
    pieces = [
        *layer_pieces(plan, of_layers, spec.layers, memories["tapes"]),
        *(
            ((layer,), piece)
            for layer, piece in library_pieces(spec, plan, checkpoint, memories["tapes"], scales)
        ),
        *((HEAD, piece) for piece in head_pieces(plan, of_heads, memories["tapes"])),
    ]
    if "embedding" in memories:
        fmt = GPU_FORMATS[rank.head.format].half if spec.tied else plan.format
        table = table_pieces(spec, fmt, checkpoint, memories["embedding"])
        pieces += [(HEAD, piece) for piece in table]
    return pieces, max(of_layers.threads, of_heads.threads)


def _starts(plan: Plan) -> list[int]:
    """Where each tape begins."""
    return [0, *accumulate(tape.bytes for tape in plan.ranks[0].tapes[:-1])]


def layer_pieces(
    plan: Plan, packing: Packing, layers: int, tapes: DeviceMemory
) -> Iterator[tuple[Layers, Piece]]:
    """A few layers after another, and of those worker after worker."""
    own = plan.ranks[0].tapes
    cuts = [[(cut, packing.of_cut(cut)) for cut in layer_cuts(plan, tape, SLOT_BYTES)] for tape in own]
    for group in layer_groups(layers, own, SLOT_BYTES):
        for tape, start, of_tape in zip(own, _starts(plan), cuts, strict=True):
            base = start + group[0] * tape.layer_bytes
            for cut, pack in of_tape:
                yield group, Piece(tapes, base + cut.first, len(group) * cut.bytes, partial(pack, group))


def head_pieces(plan: Plan, packing: Packing, tapes: DeviceMemory) -> Iterator[Piece]:
    for tape, start in zip(plan.ranks[0].tapes, _starts(plan), strict=True):
        for cut in head_cuts(plan, tape, SLOT_BYTES):
            offset = start + tape.head_segment.offset + cut.first
            yield Piece(tapes, offset, cut.bytes, partial(packing.of_cut(cut), HEAD))


def table_pieces(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, table: DeviceMemory
) -> Iterator[Piece]:
    """An embedding that is no head: row after row."""
    row_bytes = 2 * spec.width
    most = max(1, SLOT_BYTES // row_bytes)
    for start in range(0, spec.vocab, most):
        stop = min(spec.vocab, start + most)
        pack = partial(pack_table, spec, fmt, checkpoint, start, stop)
        yield Piece(table, start * row_bytes, (stop - start) * row_bytes, pack)


def _empty_scales(plan: Plan) -> Scales:
    """Places for the scales of quantised rows; rows that only pad a tile keep 0."""
    rank = plan.ranks[0]
    experts = rank.library.experts if rank.library else 0

    def shape(stage: Stage) -> tuple[int, ...]:
        rows = stage.tiles * TILE_ROWS
        return (
            (plan.layers, experts, rows) if stage.routed else (1 if stage is rank.head else plan.layers, rows)
        )

    return {
        scale_name(stage): np.zeros(shape(stage), np.float32)
        for stage in rank.stages
        if stage.layout.row_scales
    }


def _small_arrays(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """Tables that every worker reads: starts of tapes, norms and biases, positions, windows."""
    rank = plan.ranks[0]
    tapes, small = rank.tapes, small_tensors(spec, checkpoint, rank)
    biases = stage_biases(rank, small, spec.experts.count if spec.experts else 0, spec.layers)
    parts = {f"{part.role}_bias" for stage in rank.layer_stages for part in stage.parts}
    cosines, sines = position_tables(spec.rope, plan.context)
    return {
        "tape_start": np.cumsum([0, *(tape.bytes for tape in tapes[:-1])], dtype=np.int64),
        "layer_bytes": np.array([tape.layer_bytes for tape in tapes], np.int64),
        **{name: values for name, values in small.items() if name not in parts},
        **biases,
        "cosines": cosines,
        "sines": sines,
        "windows": np.array([window or 0 for window in spec.windows], np.int32),
    }


def _release(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, layers: Layers) -> None:
    """The mapped pages of these layers have been read."""
    rank = plan.ranks[0]
    stages = (rank.head,) if layers == HEAD else rank.layer_stages
    roles = [part.role for stage in stages for part in stage.parts]
    if layers == HEAD and reads_table(spec, plan):
        roles.append("embedding")
    for name in {
        tensor_name(source_of(spec, role, layer), layer, expert)
        for layer in layers
        for role in roles
        for expert in spec.experts_of(role)
    }:
        checkpoint.release(name)
