"""A GPU plan as text: what `monotape inspect --backend cuda` prints and what golden files hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from monotape.plan.gpu import (
    UNIT_POSITIONS,
    AttentionStage,
    Cut,
    GpuPlan,
    GpuRank,
    LayerKind,
    MatrixStage,
    Reset,
    Routing,
)
from monotape.plan.gpu_machines import GpuMachine
from monotape.plan.text import byte_count, library_lines, library_share, schedule_lines, table_lines
from monotape.plan.types import Plan, RankPlan


def dump_gpu(plan: GpuPlan) -> str:
    """The whole plan, one fact a line, the same on every machine."""
    source = plan.plan
    ranks = f"{len(plan.ranks)} ranks of " if len(plan.ranks) > 1 else ""
    lines = [
        f"GPU plan {plan.digest}",
        f"  model    {source.model}, {source.layers} layers, context {source.context}",
        f"  machine  {ranks}{source.machine.kind}, {plan.workers} workers, {source.machine.alignment} byte alignment",
        *([f"           {plan.machine.name}: {plan.machine.standing}"] if plan.machine.standing else []),
        f"  weights  {byte_count(source.weight_bytes)} (tapes {byte_count(source.tape_bytes)},"
        f" {library_share(source)}embedding {byte_count(source.embedding_bytes)}, norms and biases"
        f" {byte_count(source.small_bytes)}, positions {byte_count(source.table_bytes)})",
    ]
    if source.steps:
        lines += schedule_lines(source)
    for rank, of_plan in zip(plan.ranks, source.ranks, strict=True):
        lines += _rank(source, rank, of_plan, plan.machine)
    return "\n".join(lines) + "\n"


def _rank(plan: Plan, rank: GpuRank, of_plan: RankPlan, machine: GpuMachine) -> Iterator[str]:
    yield f"rank {rank.rank}"
    rows = "1 row" if rank.rows_a_pass == 1 else f"{rank.rows_a_pass} rows"
    yield f"  pass     {rows}, activations {rank.half.value}, embedding {rank.embedding.value}"
    yield from _pages(rank) if machine.ring else _registers(rank)
    yield from _kinds(rank)
    if rank.routing is not None and of_plan.library is not None:
        yield from library_lines(of_plan.library)
        yield from _routing(rank, rank.routing)
    yield "  stages"
    yield from table_lines([_stage(rank, stage) for stage in rank.matrices])
    yield "  products (tiles of one length and format)"
    yield from table_lines([_product(rank, number) for number in range(len(rank.products))])
    yield f"  exchange {rank.exchange_words:,} words of 16 bytes{', scattered' if rank.scattered else ''}"
    resets = {reset.buffer: reset for reset in rank.resets}
    yield from table_lines(
        [
            (
                buffer.name,
                f"{buffer.copies} x {buffer.words} words",
                f"at {buffer.start}",
                f"owned by {buffer.owner}",
                _reset(resets.get(buffer.name)),
            )
            for buffer in rank.buffers
        ]
    )
    yield from _kv(plan, rank)
    yield from _prefill(rank)
    yield f"  sampler  3 x {rank.sampler_words} words a worker"
    if rank.links.ranks > 1:
        yield from _links(rank)
    yield from _workers(of_plan)


def _pages(rank: GpuRank) -> Iterator[str]:
    pages = rank.pages
    yield (
        f"  ring     {pages.ring} pages of {pages.blocks} blocks ({byte_count(pages.bytes)}), beside it"
        f" {byte_count(rank.beside_ring)}"
    )
    lead = f", {byte_count(pages.lead)} ahead in the L2" if pages.lead else ", no scout"
    yield (
        f"  copies   {pages.now} in flight of what is needed now, {pages.ahead} ahead of it, {pages.polling} while"
        f" polling, {pages.attending} while attending, {pages.ticks} ticks apart{lead}"
    )


def _registers(rank: GpuRank) -> Iterator[str]:
    """A machine without bulk copies."""
    held = rank.pages.ring * rank.pages.bytes
    yield "  weights  from the tape straight into registers, two steps ahead"
    yield f"  LDS      {byte_count(rank.beside_ring)}, and {byte_count(held)} for a prefill's operands"


def _kinds(rank: GpuRank) -> Iterator[str]:
    for number, kind in enumerate(rank.kinds):
        layers = [layer for layer, of_kind in enumerate(rank.layer_kinds) if of_kind == number]
        yield f"  layers   {kind.name}: {_runs(layers)} ({' -> '.join(_flow(kind))})"


def _routing(rank: GpuRank, routing: Routing) -> Iterator[str]:
    of = "all logits" if routing.over_all else "the chosen logits"
    yield f"  choice   every worker chooses {routing.chosen} of {routing.experts} experts, weights by a softmax of {of}"
    if rank.gate is not None:
        gate = rank.gate
        yield f"  gate     gate * sigmoid({gate.alpha:g} gate) * (up + {gate.shift:g}), within {gate.limit:g}"
    if rank.sinks is not None:
        yield f"  sinks    {rank.sinks}: one more logit for each query head"


def _flow(kind: LayerKind) -> Iterator[str]:
    for stage in kind.stages:
        yield stage.name
        if isinstance(stage, AttentionStage) and stage.window:
            yield f"(last {stage.window})"


def _runs(numbers: list[int]) -> str:
    """0-3, 5, 7-9"""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        runs.append(f"{members[0]}" if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)


def _stage(rank: GpuRank, stage: MatrixStage) -> tuple[str, ...]:
    more = [f"x {stage.gain}"] if stage.gain else []
    more += [f"+ {stage.bias}"] if stage.bias else []
    more += [f"from {stage.source.value} weights"] if stage.source.value == "published" else []
    more += [f"of each of {stage.routed} experts"] if stage.routed and not stage.dealt else []
    more += [f"of {stage.dealt} experts, dealt out together"] if stage.dealt else []
    reads = " and ".join(filter(None, (stage.reads, stage.also)))
    return (
        stage.name, rank.products[stage.product].format.value, f"k {stage.k}", f"{stage.tiles} tiles",
        f"product {stage.product}", f"{reads} -> {stage.writes}", stage.epilogue.value, ", ".join(more),
    )  # fmt: skip


def _product(rank: GpuRank, number: int) -> tuple[str, ...]:
    product = rank.products[number]
    whole = product.page_run == product.blocks
    place = f"{product.tiles_in_page} tiles a page" if whole else f"{product.page_run} blocks a page"
    together = f"{product.together} at once, batches of {product.batch}"
    return (f"{number}", product.format.value, f"{product.blocks} blocks", place, together)


def _reset(reset: Reset | None) -> str:
    if reset is None:
        return "reset by its owner, when all have read the next token's"
    when = (
        "in the first layer of the next token" if reset.first_layer else ("", "of the next turn")[reset.turns]
    )
    return f"reset at {reset.at}" + (f" {when}" if when else "") + (", listed" if reset.listed else "")


def _kv(plan: Plan, rank: GpuRank) -> Iterator[str]:
    kv = rank.kv
    yield (
        f"  kv       {kv.format.value} [{kv.layers} layers][{kv.kv_heads} heads][units of {UNIT_POSITIONS} positions],"
        f" {byte_count(kv.unit_bytes)} a unit, {byte_count(kv.bytes(plan.context))} in all"
    )
    yield f"  splits   a worker more for every {kv.units_per_split} units of a head, up to {kv.splits}"


def _prefill(rank: GpuRank) -> Iterator[str]:
    prefill = rank.prefill
    yield (
        f"  prefill  {prefill.chunk} rows a pass, {byte_count(rank.prefill_bytes)} of shared memory,"
        f" {byte_count(prefill.bytes)} of rows"
    )
    yield from table_lines([(buffer.name, byte_count(buffer.bytes)) for buffer in prefill.buffers])
    yield "  cuts     (up to so many rows: rows x columns of a block of output, pieces of k)"
    yield from table_lines([(name, "; ".join(map(_cut, cuts))) for name, cuts in prefill.cuts])


def _cut(cut: Cut) -> str:
    pieces = f" / {cut.pieces}" if cut.pieces > 1 else ""
    return f"{cut.rows}: {8 * cut.row_tiles}x{8 * cut.column_tiles}{pieces}"


def _links(rank: GpuRank) -> Iterator[str]:
    links = rank.links
    yield (
        f"  inbox    of rank {links.rank} of {links.ranks}, words from id {links.first_id} on:"
        f" {byte_count(links.inbox_bytes)}, {links.slots} slots, {links.row_slots} of rows, {links.sends} sends a token"
    )
    yield from table_lines([(region.name, byte_count(region.bytes)) for region in links.regions])


def _workers(rank: RankPlan) -> Iterator[str]:
    """Workers that own alike share a line; a GPU has more than a hundred."""
    yield "  tapes    (tiles of each stage; bytes of a layer; bytes of the tape)"
    alike: dict[tuple[str, ...], list[int]] = {}
    for tape in rank.tapes:
        counts = (f"{stage.name} {stage.spans[tape.worker].count}" for stage in rank.stages)
        alike.setdefault((*counts, f"{tape.layer_bytes:,}", f"{tape.bytes:,}"), []).append(tape.worker)
    yield from table_lines([(*facts, f"workers {_runs(workers)}") for facts, workers in alike.items()])
