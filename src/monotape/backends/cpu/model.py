"""A model in memory, ready for the native workers: tapes, small tensors, position tables, and the structure that
points at them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.bridge import (
    FORMAT_CODES,
    HEAD_INPUTS,
    GroupStruct,
    ModelStruct,
    SpanStruct,
    StepStruct,
)  # fmt: skip
from monotape.backends.cpu.packer import NativePacker
from monotape.errors import CheckpointError, UnsupportedModel
from monotape.models.layer import DENSE
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

    structs: ctypes.Array[ModelStruct]  # one a rank
    group: GroupStruct | None  # shared by several ranks
    kept: list[Any] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.kept if isinstance(array, np.ndarray))


def load_model(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
) -> LoadedModel:
    """Reads the checkpoint onto the plan's tapes.

    Each rank has its own tapes. Read-only tensors that all ranks share exist once: positions, norms and the embedding.
    """
    if spec.layer != DENSE:
        raise UnsupportedModel(
            f"The CPU backend runs layers of {len(DENSE)} matrices; those of {spec.family} are others.",
            "Use --backend reference or cuda.",
        )
    model = LoadedModel((ModelStruct * len(plan.ranks))(), None)
    packer = NativePacker()
    windows = np.array([window or 0 for window in spec.windows], np.int32)
    cosines, sines = position_tables(spec.rope, plan.context)
    table = _embedding_table(spec, plan, checkpoint, packer) if plan.embedding_bytes else None
    for struct, rank in zip(model.structs, plan.ranks, strict=True):
        _set_dimensions(struct, spec, plan, rank)
        for name, array in (("windows", windows), ("cosines", cosines), ("sines", sines)):
            _point(model, struct, name, array)
        for name, array in small_tensors(spec, checkpoint, rank).items():
            _point(model, struct, name, array)
        if table is not None:
            _point(model, struct, "embedding", table)
        _load_rank(model, struct, spec, plan, rank, checkpoint, packer, progress)
    if len(plan.ranks) > 1:
        model.group = _group(model, spec, plan)
    return model


def _load_rank(
    model: LoadedModel, struct: ModelStruct, spec: ModelSpec, plan: Plan, rank: RankPlan, checkpoint: Checkpoint,
    packer: NativePacker, progress: Progress | None,
) -> None:  # fmt: skip
    tapes = load_tapes(spec, plan, checkpoint, packer, progress, rank_index=rank.rank)
    model.kept += tapes
    pointers = (ctypes.c_void_p * len(tapes))(*(tape.ctypes.data for tape in tapes))
    model.kept.append(pointers)
    struct.tapes = ctypes.addressof(pointers)
    _point(model, struct, "layer_bytes", np.array([tape.layer_bytes for tape in rank.tapes], np.int64))
    spans = _spans(rank)
    model.kept.append(spans)
    struct.spans = ctypes.addressof(spans)


def _group(model: LoadedModel, spec: ModelSpec, plan: Plan) -> GroupStruct:
    schedule = (StepStruct * len(plan.steps))(
        *(
            StepStruct(step.own, step.sends, -1 if step.folds is None else step.folds, step.whole)
            for step in plan.steps
        )
    )
    model.kept.append(schedule)
    return GroupStruct(
        ranks=len(plan.ranks), steps=len(plan.steps), slots=plan.slots, vocab=spec.vocab,
        head_input=HEAD_INPUTS[plan.head_input], schedule=ctypes.addressof(schedule),
    )  # fmt: skip


def _set_dimensions(struct: ModelStruct, spec: ModelSpec, plan: Plan, rank: RankPlan) -> None:
    for name in ("layers", "width", "head_dim", "norm_eps", "attention_scale"):
        setattr(struct, name, getattr(spec, name))
    qkv, _, gate_up, _ = rank.layer_stages
    struct.heads, struct.kv_heads = qkv.parts[0].rows // spec.head_dim, rank.kv.kv_heads
    struct.ffn, struct.vocab = gate_up.parts[0].rows, rank.head.rows
    struct.rank, struct.first_word = rank.rank, rank.head.parts[0].first
    struct.rope_dims = spec.rope.dims
    struct.context, struct.chunk, struct.workers = plan.context, plan.chunk, plan.machine.workers
    struct.kv_block = rank.kv.block
    struct.weight_format, struct.kv_format = FORMAT_CODES[plan.format], FORMAT_CODES[rank.kv.format]
    struct.deadline_us = DEADLINE_US


def _point(model: LoadedModel, struct: ModelStruct, name: str, array: NDArray[Any]) -> None:
    contiguous = np.ascontiguousarray(array)
    if not any(contiguous is kept for kept in model.kept):
        model.kept.append(contiguous)
    setattr(struct, name, contiguous.ctypes.data)


def _embedding_table(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, packer: NativePacker) -> Bytes:
    row_bytes = plan.embedding_bytes // (spec.vocab * len(plan.ranks))
    padded_k = plan.machine.layout(plan.format).padded(spec.width)
    table = aligned_bytes(row_bytes * spec.vocab)
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
