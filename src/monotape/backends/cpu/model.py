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
    STAGE_NAMES,
    GroupStruct,
    ModelStruct,
    SpanStruct,
    StepStruct,
)  # fmt: skip
from monotape.backends.cpu.packer import NativePacker
from monotape.errors import UnsupportedModel
from monotape.models.experts import SILU, Softmax
from monotape.models.layer import DENSE, SPARSE
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS
from monotape.plan.types import Plan, RankPlan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.filling import load_library, load_tapes, pack_vocabulary
from monotape.weights.small import small_tensors
from monotape.weights.tapes import Bytes, Progress, aligned_bytes

DEADLINE_US = 60_000_000  # a worker that has not come for a minute never will


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
    if spec.layer not in (DENSE, SPARSE) or (spec.layer == DENSE and spec.gating != SILU):
        raise UnsupportedModel(
            f"The CPU backend runs layers of four matrices, or of experts; those of {spec.family} are others.",
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
    if rank.library is not None:
        experts = load_library(spec, plan, checkpoint, packer, progress, rank_index=rank.rank)
        _point(model, struct, "library", experts)
        struct.expert_bytes = rank.library.expert_bytes
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
    stages = {stage.name: stage for stage in rank.stages}
    qkv, gate_up = stages["qkv"], stages["gate_up"]
    struct.heads, struct.kv_heads = qkv.parts[0].rows // spec.head_dim, rank.kv.kv_heads
    struct.ffn, struct.vocab = gate_up.parts[0].rows, rank.head.rows
    struct.rank, struct.first_word = rank.rank, rank.head.parts[0].first
    struct.rope_dims = spec.rope.dims
    struct.context, struct.chunk, struct.workers = plan.context, plan.chunk, plan.machine.workers
    struct.kv_block = rank.kv.block
    struct.formats[:] = [FORMAT_CODES[stages[name].format] if name in stages else 0 for name in STAGE_NAMES]
    _set_experts(struct, spec)
    struct.embedding_format = FORMAT_CODES[rank.head.format if spec.tied else plan.format]
    struct.kv_format = FORMAT_CODES[rank.kv.format]
    struct.deadline_us = DEADLINE_US


def _set_experts(struct: ModelStruct, spec: ModelSpec) -> None:
    if spec.experts is not None:
        struct.experts, struct.chosen = spec.experts.count, spec.experts.chosen
        struct.softmax_over_all = spec.experts.softmax is Softmax.ALL
    if spec.gating != SILU:
        struct.gate_alpha, struct.gate_shift = spec.gating.alpha, spec.gating.shift
        # abi.h: 0 is silu. No float32 is above this one.
        struct.gate_limit = (
            float(np.finfo(np.float32).max) if spec.gating.limit is None else spec.gating.limit
        )


def _point(model: LoadedModel, struct: ModelStruct, name: str, array: NDArray[Any]) -> None:
    contiguous = np.ascontiguousarray(array)
    if not any(contiguous is kept for kept in model.kept):
        model.kept.append(contiguous)
    setattr(struct, name, contiguous.ctypes.data)


def _embedding_table(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, packer: NativePacker) -> Bytes:
    """The rows of the vocabulary as tiles, for ranks that do not read them off their head's tape."""
    fmt = plan.ranks[0].head.format if spec.tied else plan.format
    layout = plan.machine.layout(fmt)
    padded_k, tiles = layout.padded(spec.width), -(-spec.vocab // TILE_ROWS)
    table = aligned_bytes(tiles * layout.tile_bytes(padded_k)).reshape(tiles, -1)
    pack_vocabulary(spec, fmt, padded_k, checkpoint, packer, table)
    return table


def _spans(rank: RankPlan) -> ctypes.Array[SpanStruct]:
    """Of each worker and stage. A stage that the model does not have is empty."""
    table = (SpanStruct * (len(rank.tapes) * len(STAGE_NAMES)))()
    library = {segment.stage: segment.offset for segment in rank.library.segments} if rank.library else {}
    for tape in rank.tapes:
        offsets = {segment.stage: segment.offset for segment in (*tape.layer_segments, tape.head_segment)}
        for stage in rank.stages:
            span = stage.spans[tape.worker]
            offset = (
                library[stage.name] + span.first * stage.tile_bytes if stage.routed else offsets[stage.name]
            )
            at = tape.worker * len(STAGE_NAMES) + STAGE_NAMES.index(stage.name)
            table[at] = SpanStruct(span.first, span.count, offset)
    return table
