"""A plan as text: what `monotape inspect` prints and what the golden files hold, so a schedule change is a diff."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from monotape.plan.types import Plan, RankPlan, Stage


def dump(plan: Plan) -> str:
    """The whole plan, one fact a line, the same on every machine."""
    lines = [
        f"plan {plan.digest}",
        f"  model    {plan.model}, {plan.layers} layers, context {plan.context}",
        f"  machine  {plan.machine.kind}, {plan.machine.workers} workers, {plan.machine.alignment} byte alignment",
        f"  weights  {plan.format.value}: {_bytes(plan.weight_bytes)}"
        f" (tapes {_bytes(plan.tape_bytes)}, embedding {_bytes(plan.embedding_bytes)},"
        f" norms and biases {_bytes(plan.small_bytes)}, positions {_bytes(plan.table_bytes)})",
        f"  a token reads {_bytes(plan.token_bytes(0))} and {_bytes(plan.ranks[0].kv.position_bytes)} per position",
        f"  prefill  {plan.chunk} rows a pass",
    ]
    for rank in plan.ranks:
        lines += _rank(plan, rank)
    return "\n".join(lines) + "\n"


def _rank(plan: Plan, rank: RankPlan) -> Iterator[str]:
    kv = rank.kv
    yield f"rank {rank.rank}"
    yield (
        f"  kv       {kv.format.value} [{kv.layers} layers][{kv.kv_heads} heads][position][{kv.head_dim}],"
        f" {kv.block} positions a block"
    )
    yield "  buffers"
    yield from _table([(b.name, f"{b.rows} x {b.width}", _bytes(b.bytes)) for b in rank.buffers])
    yield f"  stages (a layer is {' -> '.join(_flow(rank.layer_stages))})"
    yield from _table(
        [
            (
                stage.name,
                "+".join(f"{part.role}:{part.rows}" for part in stage.parts),
                f"k {stage.k}" + (f" padded {stage.padded_k}" if stage.padded_k != stage.k else ""),
                f"{stage.tiles} tiles",
                f"unit {stage.unit}",
                f"{stage.reads} -> {stage.writes}",
            )
            for stage in rank.stages
        ]
    )
    yield "  tapes (tiles of each stage; bytes of a layer; bytes of the tape)"
    yield from _table(
        [
            (
                f"worker {tape.worker}",
                *(
                    f"{stage.name} {stage.spans[tape.worker].first}+{stage.spans[tape.worker].count}"
                    for stage in rank.stages
                ),
                f"{tape.layer_bytes:,}",
                f"{tape.bytes:,}",
            )
            for tape in rank.tapes
        ]
    )


def _flow(stages: Iterable[Stage]) -> Iterator[str]:
    for stage in stages:
        if stage.reads == "attended":
            yield "attention"
        yield stage.name


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _bytes(count: int) -> str:
    return f"{count:,} B"
