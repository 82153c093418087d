"""ModelSpec + Machine -> Plan: a list of passes, read top to bottom."""

from __future__ import annotations

from collections.abc import Mapping

from monotape.compiler.balance import balance_head, balance_layer
from monotape.compiler.split import Share, lanes_for, shares
from monotape.compiler.stages import Formats, stage_shapes
from monotape.compiler.tapes import exchange_buffers, kv_layout, lay_library, lay_tapes
from monotape.models.lanes import Lanes, send_lag, steps
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.rules import verify
from monotape.plan.types import Machine, Plan, RankPlan

#: Rows of a prefill pass on a CPU: a tile stays in the cache while all rows use it; more rows only cost buffers.
CPU_CHUNK = 64
#: With experts, as many rows as give each expert about that many, up to this.
MOST_CHUNK = 512


def compile_plan(
    spec: ModelSpec,
    machine: Machine,
    fmt: Format,
    *,
    context: int,
    chunk: int | None = None,
    ranks: int | None = None,
    stage_formats: Mapping[str, Format] | None = None,
    kv_format: Format | None = None,
) -> Plan:
    """The schedule of one token of this model on `ranks` such machines, checked against every rule.

    `fmt` is the format of all weights but those of the stages in `stage_formats`, and decides that of activations.

    `kv_format`: None keeps keys and values in 16 bits, or in 32 beside float32 weights on a CPU.

    `ranks`: None takes as many as the model has lanes. `chunk`: None takes fewer rows the more ranks exchange them.
    """
    lanes, formats = lanes_for(spec, ranks), Formats(fmt, stage_formats or {})
    schedule = steps(lanes, spec.modules) if lanes.count > 1 else ()
    # Between a rank and its slowest peer lie at most 2 lag + 1 sends: ARCHITECTURE.md counts them.
    slots = 2 * send_lag(schedule) + 2 if lanes.count > 1 else 0
    rows = chunk or max(1, _chunk(spec) // lanes.count)
    split = shares(spec, lanes.count)
    of_ranks = tuple(_rank(spec, machine, formats, share, rows, lanes, slots, kv_format) for share in split)
    plan = Plan(
        model=spec.architecture,
        layers=spec.layers,
        format=fmt,
        machine=machine,
        context=context,
        chunk=rows,
        ranks=of_ranks,
        small_bytes=_small_bytes(spec, split) + sum(_scale_bytes(spec, rank) for rank in of_ranks),
        table_bytes=4 * context * spec.rope.dims * lanes.count,
        embedding_bytes=_embedding_bytes(spec, machine, _table_format(spec, machine, formats), lanes.count),
        steps=schedule,
        slots=slots,
        head_input=_head_input(lanes),
    )
    verify(plan)
    return plan


def _chunk(spec: ModelSpec) -> int:
    if spec.experts is None:
        return CPU_CHUNK
    return min(MOST_CHUNK, CPU_CHUNK * spec.experts.count // spec.experts.chosen)


def _head_input(lanes: Lanes) -> str:
    """Lanes that cannot differ need no mean, and lanes that share the vocabulary want none."""
    alike = lanes.head == "mean" and not lanes.apart and not lanes.own_norms
    return "own" if lanes.count == 1 or alike or lanes.head == "vocabulary" else lanes.head


def _rank(
    spec: ModelSpec, machine: Machine, formats: Formats, share: Share, chunk: int, lanes: Lanes, slots: int,
    kv_format: Format | None,
) -> RankPlan:  # fmt: skip
    head_reads = "residual" if _head_input(lanes) == "own" else "combined"
    layer_shapes, head_shape = stage_shapes(spec, formats, machine, share, head_reads)
    layer_stages = balance_layer(layer_shapes, machine)
    head = balance_head(head_shape, machine.workers)
    return RankPlan(
        rank=share.rank,
        layer_stages=layer_stages,
        head=head,
        tapes=lay_tapes(layer_stages, head, spec.layers, machine),
        buffers=exchange_buffers(spec, share, chunk, lanes.count, slots, head_reads),
        kv=kv_layout(spec, share, kv_format or default_kv_format(machine, formats.default)),
        library=lay_library(spec, layer_stages, machine),
    )


def default_kv_format(machine: Machine, fmt: Format) -> Format:
    """On a CPU float32 weights ask for exactness, so their KV is float32; all others keep halves."""
    if machine.kind != "cpu":
        return fmt if fmt.is_half else Format.BF16
    return Format.F32 if fmt is Format.F32 else Format.F16


def _table_format(spec: ModelSpec, machine: Machine, formats: Formats) -> Format:
    """The format of an embedding that is no head. On a GPU it is one of 16-bit floats."""
    fmt = formats.of("head") if spec.tied else formats.default
    return fmt if fmt.is_half or machine.kind == "cpu" else formats.default


def _embedding_bytes(spec: ModelSpec, machine: Machine, fmt: Format, ranks: int) -> int:
    """A single rank reads a tied embedding off its head's tape; several have the whole table each."""
    if spec.tied and ranks == 1:
        return 0
    layout = machine.layout(fmt)
    return ranks * spec.vocab * layout.tile_bytes(layout.padded(spec.width)) // TILE_ROWS


def _scale_bytes(spec: ModelSpec, rank: RankPlan) -> int:
    """Scales of rows, a float32 each, padded to tiles."""
    layer, head = (
        sum(stage.tiles for stage in stages if stage.layout.row_scales)
        for stages in (rank.layer_stages, (rank.head,))
    )
    return 4 * TILE_ROWS * (layer * spec.layers + head)


def _small_bytes(spec: ModelSpec, split: tuple[Share, ...]) -> int:
    norms = (len(spec.layer_gains) * spec.layers + 1) * spec.width + (
        2 * spec.head_dim * spec.layers if spec.qk_norm else 0
    )
    heads = sum(
        share.heads[1] - share.heads[0] + 2 * (share.kv_heads[1] - share.kv_heads[0]) for share in split
    )
    biases = spec.layers * heads * spec.head_dim if spec.qkv_bias else 0
    shared = sum(
        spec.shape_of(matrix.parts[0])[0]
        for matrix in spec.layer
        if matrix.bias != "qkv_bias" and spec.has_bias(matrix) and not matrix.routed
    )
    sinks = spec.heads if spec.sinks else 0
    return 4 * (len(split) * norms + biases + spec.layers * (len(split) * shared + sinks))
