"""Prints a GPU plan as plan.h, the kernel's one generated header: constants and the rows of its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.gpu import (
    BATCH_TILES,
    BLOCK_K,
    CUT_ROWS,
    HEAD_INPUTS,
    OTHER_STAGES,
    UNIT_POSITIONS,
    AttentionStage,
    ExchangeBuffer,
    Gate,
    GpuPlan,
    GpuRank,
)
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.plan.gpu_machines import HOPPER, WARPS

MOST_STAGES, MOST_VECTORS = 8, 16  # entries of tables in kernels/plan/params.h: Params
_LARGE_TAPES = 1 << 36  # bytes from which on a word of the tapes has no 32-bit number


@dataclass(frozen=True, slots=True)
class Variant:
    """Build options that are not part of the plan."""

    trace: bool = False  # workers write down when they did what
    prefill: bool = True  # False: for a look at the decode path alone


def plan_header(plan: GpuPlan, *, rank: int = 0, variant: Variant | None = None) -> str:
    """plan.h for one rank."""
    own, variant = plan.ranks[rank], variant or Variant()
    formats = list(dict.fromkeys([own.half, *(product.format for product in own.products), own.embedding]))
    headers = dict.fromkeys(header for fmt in formats if (header := GPU_FORMATS[fmt].header))
    taped = sum(tape.bytes for tape in plan.plan.ranks[rank].tapes)
    library = plan.plan.ranks[rank].library
    large = taped + (library.bytes if library else 0) >= _LARGE_TAPES
    lines = [
        *([] if plan.machine is HOPPER else [f"// For {plan.machine.name}."]),
        "#pragma once",
        *(f'#define MONOTAPE_FORMAT_{number} "formats/{name}.h"' for number, name in enumerate(headers)),
        "#define MONOTAPE_STORED " + " ".join(_specialisation(fmt) for fmt in formats),
        "namespace monotape {",
        _enumeration("Format", [_name(fmt) for fmt in formats]),
        _enumeration("Stage", own.stage_names),
        _enumeration("Buffer", [*(buffer.name for buffer in own.buffers), "none"]),
        _enumeration("Vector", own.vectors) + "\nconstexpr Vector kNoVector = static_cast<Vector>(-1);",
        f"constexpr int kFormats = {len(formats)};",
        *(f"constexpr int {name} = {value};" for name, value in _constants(plan, own).items()),
        *(f"constexpr bool {name} = {str(value).lower()};" for name, value in _switches(own, variant, large)),
        f"constexpr float kNormEps = {own.dimensions.norm_eps!r}f;",
        f"constexpr float kAttentionScale = {own.dimensions.attention_scale!r}f;",
        _gate(own.gate),
        f"constexpr long long kLibraryStart = {taped};",
        f"constexpr Format kHalf = Format::{_name(own.half)}, kEmbeddingFormat = Format::{_name(own.embedding)};",
        "}  // namespace monotape",
        '#include "plan/table.h"',
        "namespace monotape {",
        _table("Product", "product", _products(own)),
        _table("StageRow", "stage_row", _stages(own)),
        _table("BufferRow", "buffer_row", (_buffer(own, buffer) for buffer in own.buffers)),
        _table("ResetRow", "reset_row", _resets(own)),
        _table("Shape", "shape_row", (f"{rows}, {columns}" for rows, columns in plan.machine.shapes)),
        _cuts(own, plan.machine.shapes),
        "}  // namespace monotape",
    ]
    return "\n".join(lines) + "\n"


def _name(fmt: Format) -> str:
    return GPU_FORMATS[fmt].name


def _specialisation(fmt: Format) -> str:
    return f"template <> struct Stored<Format::{_name(fmt)}> : {GPU_FORMATS[fmt].stored} {{}};"


def _enumeration(name: str, values: Iterable[str]) -> str:
    return f"enum class {name} : int {{ {', '.join(values)} }};"


def _table(kind: str, name: str, rows: Iterable[str]) -> str:
    """A function of the row's number: its rows are constants wherever the number is one."""
    body = "".join(f"      {{{row}}},\n" for row in rows)
    return (
        f"__host__ __device__ constexpr {kind} {name}(int number) {{\n"
        f"  constexpr {kind} rows[] = {{\n{body}  }};\n  return rows[number];\n}}"
    )


def _constants(plan: GpuPlan, own: GpuRank) -> dict[str, int]:
    d, pages, kv, links, routing = own.dimensions, own.pages, own.kv, own.links, own.routing
    windows = [kind.attention.window for kind in own.kinds]
    return {
        "kRows": own.rows_a_pass, "kRowWords": own.row_words, "kRowBatch": own.row_batch,
        "kShapes": len(plan.machine.shapes),
        "kWarps": WARPS, "kTileRows": TILE_ROWS, "kBlockK": BLOCK_K, "kBatchTiles": BATCH_TILES,
        "kUnitPositions": UNIT_POSITIONS, "kWorkers": plan.workers, "kLayers": d.layers, "kWidth": d.width,
        "kHeads": d.heads, "kKvHeads": d.kv_heads, "kHeadDim": d.head_dim, "kFfn": d.ffn, "kVocab": d.vocab,
        "kAllVocab": d.all_vocab, "kRopeDims": d.rope_dims, "kMatrixStages": len(own.matrices),
        "kMostStages": MOST_STAGES, "kProducts": len(own.products), "kVectors": len(own.vectors),
        "kMostVectors": MOST_VECTORS, "kBuffers": len(own.buffers), "kResets": len(own.resets),
        "kQNorm": own.vectors.index("q_norm") if d.qk_norm else -1,  # the keys' follows
        "kKinds": len(own.kinds), "kWidestWindow": 0 if None in windows else max(window or 0 for window in windows),
        "kTurnWords": own.buffers[0].stride, "kExchangeWords": own.exchange_words, "kPageBlocks": pages.blocks,
        "kRingPages": pages.ring, "kInFlightNow": pages.now, "kInFlightAhead": pages.ahead,
        "kInFlightPolling": pages.polling, "kInFlightAttending": pages.attending, "kPageTicks": pages.ticks,
        "kLeadBytes": pages.lead, "kUnitsPerSplit": kv.units_per_split, "kMaxSplits": kv.splits,
        "kMostWidthTiles": own.residual_tiles, "kMostOwnWords": own.own_words, "kMostBlocks": own.input_blocks,
        "kPrefillBytes": own.prefill_bytes, "kChoices": own.choices, "kRanks": links.ranks, "kSlots": links.slots,
        "kRowSlots": links.row_slots, "kSends": links.sends, "kSteps": links.steps,
        "kLateFolds": links.late_folds, "kHeadInputNumber": HEAD_INPUTS.index(links.head_input),
        "kExperts": routing.experts if routing else 0, "kChosen": routing.chosen if routing else 0,
        "kExpertBytes": routing.expert_bytes if routing else 0,
        "kSinks": own.vectors.index(own.sinks) if own.sinks else -1,
        "kChunkRows": own.prefill.chunk,
        "kPartialValues": own.prefill.partial_values,
    }  # fmt: skip


def _switches(own: GpuRank, variant: Variant, large: bool) -> Iterator[tuple[str, bool]]:
    yield "kFloat16", GPU_FORMATS[own.half].half is Format.F16
    yield "kNarrowKv", own.kv.narrow
    yield "kQkvBias", any(stage.bias for stage in own.matrices)
    yield "kQkNorm", own.dimensions.qk_norm
    yield "kScattered", own.scattered
    yield "kKeepsOwn", own.links.keeps_own
    yield "kLargeTapes", large
    yield "kPrefill", variant.prefill and own.prefill.chunk > 0
    yield "kOverAll", own.routing is not None and own.routing.over_all
    yield "kTrace", variant.trace
    yield "kLinkDelay", own.links.delayed


def _gate(gate: Gate | None) -> str:
    plain, found = gate is None, gate or Gate(1.0, math.inf, 0.0)
    limit = min(found.limit, float(np.finfo(np.float32).max))
    return (
        f"constexpr bool kPlainGate = {str(plain).lower()};\n"
        f"constexpr float kGateAlpha = {found.alpha!r}f, kGateLimit = {limit!r}f, kGateShift = {found.shift!r}f;"
    )


def _products(own: GpuRank) -> Iterator[str]:
    for product in own.products:
        numbers = (
            product.blocks, product.tiles_in_page, product.page_run, product.together, product.batch,
            product.inputs, product.dealt,
        )  # fmt: skip
        yield f"Format::{_name(product.format)}, {', '.join(map(str, numbers))}"


def _stages(own: GpuRank) -> Iterator[str]:
    stages = own.kinds[0].stages
    before_attention = {
        stage.name for stage, following in pairwise(stages) if isinstance(following, AttentionStage)
    }
    for stage in own.matrices:
        writes = stage.writes if stage.writes in {buffer.name for buffer in own.buffers} else "none"
        yield (
            f"Buffer::{stage.reads}, Buffer::{writes}, {_vector(stage.gain)}, {_vector(stage.bias)}, "
            f"{_vector(stage.scale)}, Epilogue::{stage.epilogue.value}, Source::{stage.source.value}, {stage.k}, "
            f"{stage.tiles}, {stage.product}, {str(stage.name in before_attention).lower()}, {stage.routed}"
        )


def _vector(name: str | None) -> str:
    return "kNoVector" if name is None else f"Vector::{name}"


def _buffer(own: GpuRank, buffer: ExchangeBuffer) -> str:
    matrices = [stage.name for stage in own.matrices]
    owner = buffer.owner if buffer.owner in (*matrices, *OTHER_STAGES) else "sample"
    return f"{buffer.words}, {buffer.copies}, {buffer.start}, {buffer.stride}, Stage::{owner}"


def _resets(own: GpuRank) -> Iterator[str]:
    for reset in own.resets:
        flags = f"{str(reset.first_layer).lower()}, {str(reset.listed).lower()}"
        yield f"Buffer::{reset.buffer}, Stage::{reset.at}, {reset.turns}, {flags}"


def _cuts(own: GpuRank, shapes: tuple[tuple[int, int], ...]) -> str:
    """For every stage, and every CUT_ROWS rows of a chunk: the number of the block's shape, and the pieces of k."""
    rows = []
    for _, cuts in own.prefill.cuts:
        entries, done = [], 0
        for cut in cuts:
            count = cut.rows // CUT_ROWS - done
            entries += [f"{{{shapes.index((cut.row_tiles, cut.column_tiles))}, {cut.pieces}}}"] * count
            done += count
        rows.append("{" + ", ".join(entries) + "}")
    most = own.prefill.cuts[0][1][-1].rows // CUT_ROWS
    body = ",\n    ".join(rows)
    return (
        f"constexpr int kCutRows = {CUT_ROWS};\n"
        f"__constant__ unsigned char kCuts[{len(rows)}][{most}][2] = {{\n    {body}}};"
    )
