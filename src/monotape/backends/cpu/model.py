"""A model in memory, ready for the native workers: tapes, small tensors, position tables, and the structure that
points at them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.bridge import FORMAT_CODES, ModelStruct, SpanStruct
from monotape.backends.cpu.packer import NativePacker
from monotape.errors import CheckpointError
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan, RankPlan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.small import small_tensors
from monotape.weights.tapes import Bytes, Progress, aligned_bytes, load_tapes, source_of

DEADLINE_US = 60_000_000  # a worker that has not come for a minute never will
_TABLE_CHUNK = 1 << 20  # values


@dataclass(slots=True)
class LoadedModel:
    """Keeps alive every array that the native side points at."""

    struct: ModelStruct
    kept: list[Any] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.kept if isinstance(array, np.ndarray))


def load_model(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
) -> LoadedModel:
    """Reads the checkpoint onto the plan's tapes."""
    rank, packer = plan.ranks[0], NativePacker()
    model = LoadedModel(ModelStruct())
    struct = model.struct
    _set_dimensions(struct, spec, plan, rank)
    _point(model, "windows", np.array([window or 0 for window in spec.windows], np.int32))
    cosines, sines = position_tables(spec.rope, plan.context)
    _point(model, "cosines", cosines)
    _point(model, "sines", sines)
    for name, array in small_tensors(spec, checkpoint).items():
        _point(model, name, array)
    if not spec.tied:
        _point(model, "embedding", _embedding_table(spec, plan, checkpoint, packer))
    tapes = load_tapes(spec, plan, checkpoint, packer, progress)
    model.kept += tapes
    pointers = (ctypes.c_void_p * len(tapes))(*(tape.ctypes.data for tape in tapes))
    model.kept.append(pointers)
    struct.tapes = ctypes.addressof(pointers)
    _point(model, "layer_bytes", np.array([tape.layer_bytes for tape in rank.tapes], np.int64))
    spans = _spans(rank)
    model.kept.append(spans)
    struct.spans = ctypes.addressof(spans)
    return model


def _set_dimensions(struct: ModelStruct, spec: ModelSpec, plan: Plan, rank: RankPlan) -> None:
    for name in (
        "layers",
        "width",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "norm_eps",
        "attention_scale",
    ):
        setattr(struct, name, getattr(spec, name))
    struct.rope_dims = spec.rope.dims
    struct.context, struct.chunk, struct.workers = plan.context, plan.chunk, plan.machine.workers
    struct.kv_block = rank.kv.block
    struct.weight_format, struct.kv_format = FORMAT_CODES[plan.format], FORMAT_CODES[rank.kv.format]
    struct.deadline_us = DEADLINE_US


def _point(model: LoadedModel, name: str, array: NDArray[Any]) -> None:
    contiguous = np.ascontiguousarray(array)
    model.kept.append(contiguous)
    setattr(model.struct, name, contiguous.ctypes.data)


def _embedding_table(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, packer: NativePacker) -> Bytes:
    padded_k = plan.ranks[0].head.padded_k
    row_bytes = plan.embedding_bytes // spec.vocab
    table = aligned_bytes(plan.embedding_bytes)
    name = source_of(spec, "embedding", None).name
    step = max(1, _TABLE_CHUNK // padded_k)
    for start in range(0, spec.vocab, step):
        stop = min(spec.vocab, start + step)
        rows = np.zeros((stop - start, padded_k), np.float32)
        rows[:, : spec.width] = checkpoint.rows(name, start, stop)
        bad = packer.pack_table(plan.format, rows, table[start * row_bytes : stop * row_bytes])
        if bad >= 0:
            raise CheckpointError(
                f"{checkpoint.source}: row {start + bad} of tensor {name} holds a value that is not a finite "
                f"{plan.format.value} number.",
                "The file is damaged, or the weights need a wider --dtype such as bf16 or f32.",
            )
    checkpoint.release(name)
    return table


def _spans(rank: RankPlan) -> ctypes.Array[SpanStruct]:
    table = (SpanStruct * (len(rank.tapes) * len(rank.stages)))()
    for tape in rank.tapes:
        segments = (*tape.layer_segments, tape.head_segment)
        for index, (stage, segment) in enumerate(zip(rank.stages, segments, strict=True)):
            span = stage.spans[tape.worker]
            table[tape.worker * len(rank.stages) + index] = SpanStruct(span.first, span.count, segment.offset)
    return table
