"""The kernel's parameters, as kernels/plan/params.h lays them out, and the tables that they point to."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.header import MOST_STAGES, MOST_VECTORS
from monotape.backends.cuda.links import RanksStruct
from monotape.backends.cuda.sampling import SamplingStruct
from monotape.plan.gpu import GpuRank
from monotape.plan.gpu_machines import HOPPER, WORD_BYTES, GpuMachine
from monotape.plan.types import Plan, RankPlan, Segment, Stage, Tape

THREADS = HOPPER.threads
_LINE_BYTES, _COPY_BYTES = 128, 32  # of an L2; of a word in a die's copy
_COPIED_SAMPLER_WORDS = 16  # of each worker: kCopiedSamplerWords


def _pointers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, c_void_p) for name in names)


class StatusStruct(ctypes.Structure):
    """kernels/plan/params.h: HostStatus, in memory that both sides see."""

    _fields_ = (
        *((name, c_int32) for name in ("finish", "tokens", "worker", "stage", "layer")),
        ("cancel", c_uint32), ("start_ns", c_int64),
        *((name, c_int32) for name in ("filled", "drafted", "accepted")),
    )  # fmt: skip


class RowsStruct(ctypes.Structure):
    """kernels/plan/params.h: Rows"""

    _fields_ = _pointers("residual", "normed", "queries", "attended", "activation", "partials")


class ParamsStruct(ctypes.Structure):
    """kernels/plan/params.h: Params"""

    _fields_ = (
        *_pointers("tapes", "tape_start", "layer_bytes", "spans", "places"), ("vectors", c_void_p * MOST_VECTORS),
        *_pointers("cosines", "sines", "windows", "embedding", "kv", "exchange"),
        ("rows", RowsStruct),
        *_pointers("logits", "logits_out", "status", "prompt", "stop_ids", "ids", "times_ns", "trace"),
        ("kv_units", c_int64), ("deadline_ns", c_int64), ("choice_stride", c_int64),
        ("first_place", c_int32 * MOST_STAGES),
        *((name, c_int32) for name in ("prompt_length", "cached", "max_tokens", "stop_count", "chunk")),
        ("trace_tokens", c_int32),
        ("sampling", SamplingStruct), *_pointers("sampler_words"), ("ranks", RanksStruct),
        *_pointers("history"), ("history_length", c_int32), *_pointers("chains"),
    )  # fmt: skip


def exchange_bytes(rank: GpuRank, workers: int) -> int:
    """kernels/plan/params.h: sizeof(Exchange)"""
    return WORD_BYTES * (rank.exchange_words + 2 + workers)  # counters, choices; what each worker waited for


def die_bytes(machine: GpuMachine, rank: GpuRank, workers: int) -> int:
    """kernels/exchange/dies.h: Copies, from the line after the exchange on; none on a GPU of one die."""
    if machine.dies == 1:
        return 0
    copied = sum(buffer.words * buffer.copies for buffer in rank.buffers if buffer.name != "partials")
    copied += rank.further_rows
    start = -exchange_bytes(rank, workers) % _LINE_BYTES
    size = machine.dies * (-(-copied * _COPY_BYTES // _LINE_BYTES) * _LINE_BYTES) + 4 * workers
    return start + -(-size // _LINE_BYTES) * _LINE_BYTES


def sampler_bytes(machine: GpuMachine, rank: GpuRank, workers: int) -> int:
    """kernels/sampling/team.h: words of 16 bytes, for three turns; from the next line on, copies for each die."""
    size = 3 * WORD_BYTES * workers * rank.sampler_words
    if machine.dies == 1:
        return size
    copies = machine.dies * 3 * workers * _COPIED_SAMPLER_WORDS * _COPY_BYTES
    return -(-size // _LINE_BYTES) * _LINE_BYTES + copies


def span_table(plan: Plan) -> NDArray[Any]:
    """kernels/plan/params.h: Span, [workers][stages]"""
    rank = plan.ranks[0]
    table = np.zeros(
        (plan.machine.workers, len(rank.stages)), [("first", "i4"), ("count", "i4"), ("offset", "i8")]
    )
    for tape in rank.tapes:
        for index, stage in enumerate(rank.stages):
            span = stage.spans[tape.worker]
            table[tape.worker, index] = (span.first, span.count, _segment(rank, tape, stage).offset)
    return table


def _segment(rank: RankPlan, tape: Tape, stage: Stage) -> Segment:
    """Where the tiles of a stage lie: on a worker's tape, or in the run of an expert."""
    experts = rank.library.segments if rank.library else ()
    segments = (*tape.layer_segments, tape.head_segment, *experts)
    return next(segment for segment in segments if segment.stage == stage.name)


def place_table(plan: Plan) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """kernels/plan/params.h: TilePlace of every tile of every stage, and where each stage's tiles begin."""
    rank = plan.ranks[0]
    starts = np.cumsum([0, *(tape.bytes for tape in rank.tapes)])
    tables, first = [], [0]
    for stage in rank.stages:
        tile_bytes = stage.tile_bytes
        places = np.zeros((stage.tiles, 2), np.int64)
        if stage.routed:
            assert rank.library is not None
            offset = starts[-1] + _segment(rank, rank.tapes[0], stage).offset
            places[:, 0] = offset + tile_bytes * np.arange(stage.tiles, dtype=np.int64)
            places[:, 1] = rank.library.experts * rank.library.expert_bytes
            tables.append(places)
            first.append(first[-1] + stage.tiles)
            continue
        for tape, start, span in zip(rank.tapes, starts, stage.spans, strict=False):
            segment = _segment(rank, tape, stage)
            places[span.first : span.end, 0] = (
                start + segment.offset + tile_bytes * np.arange(span.count, dtype=np.int64)
            )
            places[span.first : span.end, 1] = 0 if stage is rank.head else tape.layer_bytes
        tables.append(places)
        first.append(first[-1] + stage.tiles)
    return np.concatenate(tables), tuple(first[:-1])
