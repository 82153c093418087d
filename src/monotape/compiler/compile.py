"""ModelSpec + Machine -> Plan: a list of passes, read top to bottom."""

from __future__ import annotations

from monotape.compiler.balance import balance_head, balance_layer
from monotape.compiler.stages import stage_shapes
from monotape.compiler.tapes import exchange_buffers, kv_layout, lay_tapes
from monotape.models.spec import ModelSpec
from monotape.plan.rules import verify
from monotape.plan.types import TILE_ROWS, Format, Machine, Plan, RankPlan

#: Rows of a prefill pass on a CPU: a tile stays in cache while all of them use it; more rows only cost buffers.
CPU_CHUNK = 64


def compile_plan(
    spec: ModelSpec,
    machine: Machine,
    fmt: Format,
    *,
    context: int,
    chunk: int = CPU_CHUNK,
) -> Plan:
    """The schedule of one token of this model on this machine, checked against every rule."""
    layer_shapes, head_shape = stage_shapes(spec, fmt, machine)
    layer_stages = balance_layer(layer_shapes, fmt, machine)
    head = balance_head(head_shape, machine.workers)
    tapes = lay_tapes(layer_stages, head, spec.layers, fmt, machine)
    rank = RankPlan(
        rank=0,
        layer_stages=layer_stages,
        head=head,
        tapes=tapes,
        buffers=exchange_buffers(spec, chunk),
        kv=kv_layout(spec, default_kv_format(machine, fmt)),
    )
    plan = Plan(
        model=spec.architecture,
        layers=spec.layers,
        format=fmt,
        machine=machine,
        context=context,
        chunk=chunk,
        ranks=(rank,),
        small_bytes=_small_bytes(spec),
        table_bytes=4 * context * spec.rope.dims,
        embedding_bytes=0 if spec.tied else spec.vocab * fmt.tile_bytes(head.padded_k) // TILE_ROWS,
    )
    verify(plan)
    return plan


def default_kv_format(machine: Machine, fmt: Format) -> Format:
    """On a CPU float32 weights ask for exactness, so their KV is float32; all others keep halves."""
    if machine.kind == "cuda":
        return Format.BF16
    return Format.F32 if fmt is Format.F32 else Format.F16


def _small_bytes(spec: ModelSpec) -> int:
    norms = (2 * spec.layers + 1) * spec.width + (2 * spec.head_dim * spec.layers if spec.qk_norm else 0)
    biases = spec.layers * (spec.q_rows + 2 * spec.kv_rows) if spec.qkv_bias else 0
    return 4 * (norms + biases)
