"""Lowers a Plan to a GpuPlan, one rank after another, and checks the result against every rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from monotape.compiler.compile import compile_plan
from monotape.compiler.gpu.exchange import (
    exchange_of,
    is_scattered,
    matrix_stages,
    own_words,
    with_attention,
)
from monotape.compiler.gpu.limits import (
    check_model,
    check_plan,
    check_room,
    rows_bytes,
)
from monotape.compiler.gpu.links import links_of, most_rows
from monotape.compiler.gpu.pages import (
    Room,
    input_blocks_of,
    inputs_of,
    page_blocks,
    pages_for,
    product_of,
    row_blocks_of,
    with_row_batch,
)
from monotape.compiler.gpu.rows import chunk_for, row_plan
from monotape.errors import UnsupportedModel
from monotape.models.experts import SILU, Softmax
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.gpu import (
    BATCH_TILES,
    SINKS,
    Dimensions,
    Gate,
    GpuPlan,
    GpuRank,
    KvUnits,
    LayerKind,
    MatrixStage,
    Product,
    Routing,
)
from monotape.plan.gpu_formats import scale_name
from monotape.plan.gpu_machines import GPU_MACHINES
from monotape.plan.gpu_rules import verify
from monotape.plan.types import Machine, Plan, RankPlan
from monotape.plan.types import Stage as PlanStage

MOST_ROWS = 4  # of a decode pass: a product has two columns for each


@dataclass(frozen=True, slots=True)
class Tuning:
    """Choices that experiments and tests override."""

    units_per_split: int = (
        8  # fewer positions are not worth another worker: adding parts up takes an exchange
    )
    page_blocks: int | None = None  # None: the best size by `page_blocks`
    ring: int | None = None  # pages; None: as many as fit
    rows: int = 1  # tokens that a decode pass computes
    link_delay: bool = False
    published: tuple[str, ...] = ()  # stages whose weights are chosen while the kernel runs
    choices: int = 2


def gpu_plan(
    spec: ModelSpec, workers: int, context: int, fmt: Format = Format.BF16, tp: int | None = None, *,
    stage_formats: Mapping[str, Format] | None = None, tuning: Tuning | None = None, backend: str = "cuda",
    kv_format: Format | None = None,
) -> GpuPlan:  # fmt: skip
    """The plan for GPUs: 32 values along k at a time, heads finished by the worker that attends to them.

    `workers` are those of one rank.
    """
    machine = Machine(backend, workers, alignment=128, whole_heads=False, levels=False)
    plan = compile_plan(
        spec, machine, fmt, context=context, ranks=tp, stage_formats=stage_formats, kv_format=kv_format
    )
    return lower(spec, plan, tuning)


def drafting_plan(spec: ModelSpec, alone: GpuPlan) -> GpuPlan | None:
    """Of a kernel for the same tapes and KV whose passes have several rows, to check drafts; None if there is none.

    It gives the same bits as the plan for a token alone, because it multiplies tiles in the same parts.
    """
    if not _takes_rows(spec, alone.plan):
        return None
    own = alone.ranks[0]
    tuning = Tuning(page_blocks=own.pages.blocks, units_per_split=own.kv.units_per_split)
    for rows in (MOST_ROWS, MOST_ROWS // 2):
        try:
            found = lower(spec, alone.plan, replace(tuning, rows=rows))
        except UnsupportedModel:  # there is no room for so many
            continue
        if [_parts(product) for product in found.ranks[0].products] == [_parts(one) for one in own.products]:
            return found
    return None


def _parts(product: Product) -> tuple[Format, int, int, bool]:
    """What the order of a tile's sums depends on: see kChains in kernels/token/tiles.h."""
    return product.format, product.blocks, product.page_run, product.together == 1


def _takes_rows(spec: ModelSpec, plan: Plan) -> bool:
    """Whether a pass of this model may have several rows.

    One rank of a GPU with a ring, dense layers that all see the same positions, and weights of 16 bits: products of
    codes use the columns of further rows for groups of their scales, and their inputs lie in shared memory.
    """
    alike = len(set(spec.windows)) == 1 and spec.experts is None
    halves = all(stage.format.is_half for rank in plan.ranks for stage in rank.stages)
    return GPU_MACHINES[plan.machine.kind].ring and len(plan.ranks) == 1 and alike and halves


def lower(spec: ModelSpec, plan: Plan, tuning: Tuning | None = None) -> GpuPlan:
    check_plan(plan)
    lowering = [_Lowering(spec, plan, rank, tuning or Tuning()) for rank in plan.ranks]
    found = GpuPlan(plan, tuple(rank.rank() for rank in lowering))
    verify(found)
    return found


def _likeness(stage: PlanStage) -> tuple[int, Format, int, int]:
    """Stages that are alike in this share a product."""
    return stage.padded_k, stage.format, inputs_of(stage), stage.dealt


class _Lowering:
    """Lowers one rank."""

    def __init__(self, spec: ModelSpec, plan: Plan, rank: RankPlan, tuning: Tuning) -> None:
        self._spec, self._plan, self._rank, self._tuning = spec, plan, rank, tuning
        self._workers, self._gpu = plan.machine.workers, GPU_MACHINES[plan.machine.kind]
        self._dimensions = self._find_dimensions()
        check_model(self._dimensions, self._workers)

    def rank(self) -> GpuRank:
        rank, d, tuning, workers = self._rank, self._dimensions, self._tuning, self._workers
        numbers, lengths = self._product_numbers()
        layer, head = matrix_stages(rank, numbers, tuning.published)
        splits = max(1, workers // d.kv_heads)
        exchange = exchange_of(d, layer, workers, splits, tuning.rows)
        residual = next(stage for stage in rank.layer_stages if stage.writes == "residual")
        room = Room(
            d, input_blocks=max(input_blocks_of(stage) for stage in rank.stages),
            own_words=own_words(rank, d, exchange, tuning.rows),
            residual_tiles=max(1, *(span.count for span in residual.spans)),
            steps=len(self._plan.steps), rows=tuning.rows,
            row_blocks=row_blocks_of(rank.stages, d.width, self._gpu), gpu=self._gpu, choice=self._choice_bytes(),
            codes=not all(stage.format.is_half for stage in rank.stages),
        )  # fmt: skip
        room = with_row_batch(rank, room)
        check_room(rank, room)
        blocks = tuning.page_blocks or page_blocks(rank, room)
        kinds, layer_kinds = self._kinds(layer)
        chunk = self._chunk()
        return GpuRank(
            rank=rank.rank, dimensions=d, half=self._plan.format, rows_a_pass=tuning.rows, row_batch=room.row_batch,
            choices=tuning.choices if tuning.published else 1,
            vectors=self._vectors(),
            products=tuple(product_of(stage, blocks, self._gpu, room.rows, room.row_batch) for stage in lengths),
            kinds=kinds, layer_kinds=layer_kinds, head=head,
            embedding=rank.head.format if self._spec.tied else self._plan.format,
            pages=pages_for(
                rank, blocks, tuning.ring or room.pages(blocks), len(self._plan.ranks), self._gpu
            ),
            buffers=exchange.buffers, resets=exchange.resets, scattered=self._scattered(),
            own_words=room.own_words, residual_tiles=room.residual_tiles, input_blocks=room.input_blocks,
            kv=KvUnits(
                d.layers, d.kv_heads, d.head_dim, rank.kv.format, tuning.units_per_split, splits
            ),
            beside_ring=room.bytes, prefill_bytes=rows_bytes(room, blocks),
            prefill=row_plan(d, (*layer, head), workers, chunk, self._gpu, self._routing()),
            sampler_words=1 + self._gpu.consumers // 2,  # kernels/sampling/cut.h: kSamplerWords
            links=links_of(
                self._plan, rank.rank, d.width, d.all_vocab, chunk, link_delay=tuning.link_delay
            ),
            routing=self._routing(), gate=self._gate(), sinks=SINKS if self._spec.sinks else None,
        )  # fmt: skip

    def _find_dimensions(self) -> Dimensions:
        """The rank's heads, feed-forward columns and vocabulary."""
        spec, rank = self._spec, self._rank
        rows = {part.role: part.rows for stage in rank.stages for part in stage.parts}
        return Dimensions(
            layers=spec.layers, width=spec.width, heads=rows["q"] // spec.head_dim, kv_heads=rank.kv.kv_heads,
            head_dim=spec.head_dim, ffn=rows["gate"], vocab=rank.head.parts[0].rows, all_vocab=spec.vocab,
            rope_dims=spec.rope.dims, norm_eps=spec.norm_eps, attention_scale=spec.attention_scale,
            qk_norm=spec.qk_norm,
        )  # fmt: skip

    def _product_numbers(self) -> tuple[dict[str, int], list[PlanStage]]:
        """The product number of each stage, and one stage per number: stages with equal shapes share a product."""
        numbers: dict[str, int] = {}
        lengths: list[PlanStage] = []
        for stage in self._rank.stages:
            keys, own = [_likeness(other) for other in lengths], _likeness(stage)
            if own not in keys:
                lengths.append(stage)
                keys.append(own)
            numbers[stage.name] = keys.index(own)
        return numbers, lengths

    def _routing(self) -> Routing | None:
        experts, library = self._spec.experts, self._rank.library
        if experts is None or library is None:
            return None
        over_all = experts.softmax is Softmax.ALL
        return Routing(experts.count, experts.chosen, over_all, library.expert_bytes)

    def _gate(self) -> Gate | None:
        gating = self._spec.gating
        if gating == SILU:
            return None
        limit = math.inf if gating.limit is None else gating.limit
        return Gate(gating.alpha, limit, gating.shift)

    def _choice_bytes(self) -> int:
        """kernels/worker/shared.h: the chosen experts, their weights, and the scales of their rows."""
        if self._spec.experts is None:
            return 0
        scaled = any(stage.layout.row_scales and inputs_of(stage) for stage in self._rank.stages)
        scales = 4 * BATCH_TILES * TILE_ROWS if scaled else 4
        return self._spec.experts.chosen * (8 + scales)

    def _kinds(self, layer: tuple[MatrixStage, ...]) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
        """Layers with the same attention window are of one kind."""
        windows = list(dict.fromkeys(self._spec.windows))
        kinds = tuple(
            LayerKind("full" if window is None else f"window {window}", with_attention(layer, window))
            for window in windows
        )
        return kinds, tuple(windows.index(window) for window in self._spec.windows)

    def _vectors(self) -> tuple[str, ...]:
        """Norms and biases that stages name, and those of the heads."""
        stages = self._rank.stages
        named = [name for stage in stages for name in (stage.gain, stage.bias) if name]
        named += ["q_norm", "k_norm"] if self._spec.qk_norm else []
        named += [SINKS] if self._spec.sinks else []
        named += [scale_name(stage) for stage in stages if stage.layout.row_scales]
        return tuple(dict.fromkeys(named))

    def _chunk(self) -> int:
        """The same for all ranks, because they exchange its rows."""
        plan = self._plan
        return (
            chunk_for(plan.context, most_rows(self._spec.width, plan))
            if plan.steps
            else chunk_for(plan.context)
        )

    def _scattered(self) -> bool:
        """Whether some worker of some rank can run far ahead: ranks are built alike."""
        return any(is_scattered(rank) for rank in self._plan.ranks)
