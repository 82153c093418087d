"""What the kernel is told: its parameters as kernels/types.h lays them out, and the tables they point to."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.links import RanksStruct
from monotape.backends.cuda.sampling import SamplingStruct
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan

THREADS = 12 * 32
STAGES = ("qkv", "output", "gate_up", "down", "head", "attention", "combine", "sample", "rows")
STAGE_ORDER = (0, 3, 4, 5, 6, 1, 2, 7, -1)  # in which a token passes them
MATRIX_STAGES = 5
TRACED_STAGES = 8  # all but the last
SAMPLER_WORDS = 1 + 256 // 2  # kernels/select.h: kSamplerWords


def _pointers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, c_void_p) for name in names)


class StatusStruct(ctypes.Structure):
    """kernels/types.h: HostStatus, in memory that both sides see."""

    _fields_ = (
        *((name, c_int32) for name in ("finish", "tokens", "worker", "stage", "layer")),
        ("cancel", c_uint32), ("start_ns", c_int64),
    )  # fmt: skip


class RowsStruct(ctypes.Structure):
    """kernels/types.h: Rows"""

    _fields_ = _pointers("residual", "normed", "queries", "attended", "activation", "partials")


class ParamsStruct(ctypes.Structure):
    """kernels/types.h: Params"""

    _fields_ = (
        *_pointers("tapes", "tape_start", "layer_bytes", "spans", "places", "attention_norm", "ffn_norm", "final_norm"),
        *_pointers("qkv_bias", "q_norm", "k_norm", "cosines", "sines", "windows", "embedding", "kv", "exchange"),
        ("rows", RowsStruct),
        *_pointers("logits", "logits_out", "status", "prompt", "stop_ids", "ids", "times_ns", "trace"),
        ("kv_units", c_int64), ("deadline_ns", c_int64), ("first_place", c_int32 * MATRIX_STAGES),
        *((name, c_int32) for name in ("prompt_length", "cached", "max_tokens", "stop_count", "chunk")),
        *((name, c_int32) for name in ("widest_window", "trace_tokens")),
        ("sampling", SamplingStruct), *_pointers("sampler_words"), ("ranks", RanksStruct),
    )  # fmt: skip


def exchange_bytes(spec: ModelSpec, plan: Plan) -> int:
    """kernels/types.h: sizeof(Exchange)"""
    workers = plan.machine.workers
    splits = max(1, workers // spec.kv_heads)
    width, ffn = -(-spec.width // 8), -(-spec.ffn // 8)
    words = 3 * width + (spec.q_rows + 2 * spec.kv_rows) // 8 + spec.heads * splits * (spec.head_dim // 4 + 1)
    return 2 * 16 * (words + spec.q_rows // 8 + ffn) + 3 * 16 * workers + 16 + 16 * workers


def sampler_bytes(plan: Plan) -> int:
    """kernels/team.h: words of 16 bytes, for three turns."""
    return 3 * 16 * plan.machine.workers * SAMPLER_WORDS


def span_table(plan: Plan) -> NDArray[Any]:
    """kernels/types.h: Span, [workers][stages]"""
    rank = plan.ranks[0]
    table = np.zeros(
        (plan.machine.workers, len(rank.stages)), [("first", "i4"), ("count", "i4"), ("offset", "i8")]
    )
    for tape in rank.tapes:
        segments = (*tape.layer_segments, tape.head_segment)
        for index, (stage, segment) in enumerate(zip(rank.stages, segments, strict=True)):
            span = stage.spans[tape.worker]
            table[tape.worker, index] = (span.first, span.count, segment.offset)
    return table


def place_table(plan: Plan) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """kernels/types.h: TilePlace of every tile of every stage, and where each stage's tiles begin in the table."""
    rank = plan.ranks[0]
    starts = np.cumsum([0, *(tape.bytes for tape in rank.tapes)])
    tables, first = [], [0]
    for index, stage in enumerate(rank.stages):
        tile_bytes = plan.format.tile_bytes(stage.padded_k)
        places = np.zeros((stage.tiles, 2), np.int64)
        for tape, start, span in zip(rank.tapes, starts, stage.spans, strict=False):
            segment = (*tape.layer_segments, tape.head_segment)[index]
            places[span.first : span.end, 0] = (
                start + segment.offset + tile_bytes * np.arange(span.count, dtype=np.int64)
            )
            places[span.first : span.end, 1] = 0 if stage is rank.head else tape.layer_bytes
        tables.append(places)
        first.append(first[-1] + stage.tiles)
    return np.concatenate(tables), tuple(first[:-1])
