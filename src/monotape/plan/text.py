"""A plan as text: what `monotape inspect` prints and what the golden files hold, so a schedule change is a diff."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from monotape.plan.types import Library, Plan, RankPlan, Stage, Step

_HEAD_INPUTS = {
    "own": "its own rank's residual",
    "mean": "the mean of the ranks' normalised residuals",
    "sum": "the sum of the ranks' residuals, normalised",
    "concatenate": "the ranks' normalised residuals side by side",
}


def dump(plan: Plan) -> str:
    """The whole plan, one fact a line, the same on every machine."""
    lines = [
        f"plan {plan.digest}",
        f"  model    {plan.model}, {plan.layers} layers, context {plan.context}",
        f"  machine  {_machines(plan)}, {plan.machine.alignment} byte alignment",
        f"  weights  {plan.formats}: {byte_count(plan.weight_bytes)}"
        f" (tapes {byte_count(plan.tape_bytes)}, {library_share(plan)}embedding {byte_count(plan.embedding_bytes)},"
        f" norms and biases {byte_count(plan.small_bytes)}, positions {byte_count(plan.table_bytes)})",
        f"  a token reads {byte_count(plan.token_bytes(0))} and {byte_count(_position_bytes(plan))} per position",
        f"  prefill  {plan.chunk} rows a pass",
    ]
    if plan.steps:
        lines += schedule_lines(plan)
    for rank in plan.ranks:
        lines += _rank(plan, rank)
    return "\n".join(lines) + "\n"


def _machines(plan: Plan) -> str:
    each = f"{plan.machine.kind}, {plan.machine.workers} workers"
    return each if len(plan.ranks) == 1 else f"{len(plan.ranks)} ranks of {each}"


def library_share(plan: Plan) -> str:
    return f"experts {byte_count(plan.library_bytes)}, " if plan.library_bytes else ""


def _position_bytes(plan: Plan) -> int:
    return sum(rank.kv.position_bytes for rank in plan.ranks)


def schedule_lines(plan: Plan) -> Iterator[str]:
    """What becomes of each module's partial outputs; modules that do alike share a line."""
    yield f"  exchange {plan.slots} sends are kept, a head reads {_HEAD_INPUTS[plan.head_input]}"
    yield "  modules (attention of layer n is module 2 n, feed-forward 2 n + 1)"
    rows: list[tuple[int, str]] = []
    for module, step in enumerate(plan.steps):
        text = _step(module, step, module < plan.modules)
        if not rows or rows[-1][1] != text:
            rows.append((module, text))
    ends = [first - 1 for first, _ in rows[1:]] + [len(plan.steps) - 1]
    yield from table_lines(
        [
            (f"{first}" if first == end else f"{first} to {end}", text)
            for (first, text), end in zip(rows, ends, strict=True)
        ]
    )


def _step(module: int, step: Step, computes: bool) -> str:
    done = []
    if step.own:
        done.append(f"add own x {step.own:g}")
    if step.sends:
        done.append("send")
    if step.folds is not None:
        late = module - step.folds
        what = "the sum" if step.whole else "the others' sum"
        done.append(f"fold {what} {f'of module n - {late}' if late else 'at once'}")
    return (", ".join(done) or "nothing") + ("" if computes else " (after the last)")


def _rank(plan: Plan, rank: RankPlan) -> Iterator[str]:
    kv = rank.kv
    yield f"rank {rank.rank}"
    yield (
        f"  kv       {kv.format.value} [{kv.layers} layers][{kv.kv_heads} heads][position][{kv.head_dim}],"
        f" {kv.block} positions a block"
    )
    yield "  buffers"
    yield from table_lines([(b.name, f"{b.rows} x {b.width}", byte_count(b.bytes)) for b in rank.buffers])
    mixed = any(stage.format is not plan.format for stage in rank.stages)
    yield f"  stages (a layer is {' -> '.join(_flow(rank.layer_stages))})"
    yield from table_lines(
        [
            (
                stage.name,
                "+".join(
                    f"{part.role}:{part.rows}" + (f"@{part.first}" if part.first else "")
                    for part in stage.parts
                ),
                f"k {stage.k}"
                + (f"@{stage.first_k}" if stage.first_k else "")
                + (f" padded {stage.padded_k}" if stage.padded_k != stage.k else ""),
                f"{stage.tiles} tiles",
                f"unit {stage.unit}",
                f"{stage.reads} -> {stage.writes}",
                *((stage.format.value,) if mixed else ()),
                *((_routed(stage, rank.library),) if rank.library else ()),
            )
            for stage in rank.stages
        ]
    )
    if rank.library:
        yield from library_lines(rank.library)
    yield "  tapes (tiles of each stage; bytes of a layer; bytes of the tape)"
    yield from table_lines(
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


def _routed(stage: Stage, library: Library) -> str:
    return f"{stage.routed} of {library.experts} experts" if stage.routed else ""


def library_lines(library: Library) -> Iterator[str]:
    yield (
        f"  library  [{library.layers} layers][{library.experts} experts],"
        f" {byte_count(library.expert_bytes)} an expert, biases {byte_count(library.bias_bytes)};"
        f" a token reads {byte_count(library.token_bytes)}"
    )
    yield from table_lines(
        [(segment.stage, f"at {segment.offset:,}", byte_count(segment.bytes)) for segment in library.segments]
    )


def _flow(stages: Iterable[Stage]) -> Iterator[str]:
    for stage in stages:
        if stage.reads == "attended":
            yield "attention"
        yield stage.name


def table_lines(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def byte_count(count: int) -> str:
    return f"{count:,} B"
