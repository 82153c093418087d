"""Every rule of a plan, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from monotape.compiler.compile import compile_plan
from monotape.errors import PlanError
from monotape.models.experts import Experts
from monotape.models.lanes import Lanes
from monotape.models.layer import SPARSE
from monotape.plan.formats import Format
from monotape.plan.rules import RULES, verify, violations
from monotape.plan.types import Machine, Plan, RankPlan, Segment, Span, Stage, Step, Tape
from plan.plans import spec


def good_plan() -> Plan:
    model = spec("LlamaForCausalLM", 3, 54, 6, 2, 10, 76, 131)
    return compile_plan(model, Machine("cpu", 3), Format.Q8, context=160)


def sparse_plan() -> Plan:
    model = spec("MixtralForCausalLM", 3, 54, 6, 2, 10, 76, 131)
    model = replace(model, layer=SPARSE, experts=Experts(5, 2))
    return compile_plan(model, Machine("cpu", 3), Format.Q8, context=160)


def with_library(plan: Plan, **changes: object) -> Plan:
    library = plan.ranks[0].library
    assert library is not None
    return with_rank(plan, library=replace(library, **changes))  # type: ignore[arg-type]


def with_rank(plan: Plan, **changes: object) -> Plan:
    return replace(plan, ranks=(replace(plan.ranks[0], **changes),))  # type: ignore[arg-type]


def with_stage(plan: Plan, index: int, change: Callable[[Stage], Stage]) -> Plan:
    stages = list(plan.ranks[0].layer_stages)
    stages[index] = change(stages[index])
    return with_rank(plan, layer_stages=tuple(stages))


def with_tape(plan: Plan, change: Callable[[Tape], Tape]) -> Plan:
    tapes = plan.ranks[0].tapes
    return with_rank(plan, tapes=(change(tapes[0]), *tapes[1:]))


def moved(tape: Tape, segment: int, by: int) -> Tape:
    segments = list(tape.layer_segments)
    segments[segment] = replace(segments[segment], offset=segments[segment].offset + by)
    return replace(tape, layer_segments=tuple(segments))


def all_to_first_worker(plan: Plan) -> Plan:
    """One owner for every tile, tapes consistent with it: nothing is wrong but the balance."""
    rank: RankPlan = plan.ranks[0]

    def hoard(stage: Stage) -> Stage:
        rest = (Span(stage.tiles, 0),) * (len(stage.spans) - 1)
        return replace(stage, spans=(Span(0, stage.tiles), *rest))

    return with_rank(plan, layer_stages=tuple(hoard(stage) for stage in rank.layer_stages))


def shifted(stage: Stage, by: int) -> Stage:
    first, second, *rest = stage.spans
    return replace(
        stage, spans=(Span(first.first, first.count + by), Span(second.first + by, second.count - by), *rest)
    )


BREAKERS: dict[str, Callable[[Plan], Plan]] = {
    "formats": lambda plan: with_stage(plan, 1, lambda stage: replace(stage, format=Format.F16)),
    "ranks in order": lambda plan: with_rank(plan, rank=1),
    "a span a worker": lambda plan: with_stage(plan, 0, lambda s: replace(s, spans=s.spans[:-1])),
    "one owner": lambda plan: with_stage(
        plan, 1, lambda s: replace(s, spans=(replace(s.spans[0], count=s.spans[0].count + 1), *s.spans[1:]))
    ),
    "residual": lambda plan: with_stage(plan, 3, lambda s: shifted(s, 1)),
    "whole units": lambda plan: with_stage(plan, 2, lambda s: shifted(s, 1)),
    "tiles cover rows": lambda plan: with_stage(
        plan, 1, lambda s: replace(s, parts=(replace(s.parts[0], rows=99, group=99),))
    ),
    "whole blocks": lambda plan: with_stage(plan, 0, lambda s: replace(s, padded_k=s.k)),
    "tape holds its tiles": lambda plan: with_tape(
        plan, lambda t: replace(t, layer_segments=(t.layer_segments[1], t.layer_segments[0], *t.layer_segments[2:]))
    ),
    "tape is one run": lambda plan: with_tape(plan, lambda t: moved(t, 1, 64)),
    "aligned": lambda plan: with_tape(plan, lambda t: moved(t, 1, 4)),
    "balanced": all_to_first_worker,
    "library holds experts": lambda plan: with_stage(plan, 3, lambda stage: replace(stage, routed=2)),
    "chosen before routed": lambda plan: with_stage(plan, 3, lambda stage: replace(stage, routed=2)),
    "buffers exist": lambda plan: with_stage(plan, 3, lambda s: replace(s, reads="nowhere")),
    "written before read": lambda plan: with_stage(plan, 1, lambda s: replace(s, reads="activation")),
    "chunk fits": lambda plan: replace(plan, chunk=plan.chunk + 1),
    "shares cover": lambda plan: with_stage(
        plan, 0, lambda s: replace(s, parts=(replace(s.parts[0], first=8), *s.parts[1:]))
    ),
    "columns follow rows": lambda plan: with_stage(plan, 3, lambda s: replace(s, first_k=1)),
    "steps fit": lambda plan: replace(plan, steps=(Step(1.0, False, None, False),)),
    "slots suffice": lambda plan: replace(plan, steps=(Step(0.0, True, 0, True),), slots=1),
    "kv makes sense": lambda plan: with_rank(plan, kv=replace(plan.ranks[0].kv, format=Format.Q8)),
}  # fmt: skip


def test_a_compiled_plan_breaks_no_rule() -> None:
    assert violations(good_plan()) == []


def several_ranks() -> Plan:
    """Four ranks, two KV heads for them all, a delay of two modules."""
    model = replace(spec("L", 4, 90, 8, 2, 10, 76, 131), lanes=Lanes(4, 2))
    return compile_plan(model, Machine("cpu", 3), Format.Q8, context=160)


def with_step(plan: Plan, module: int, **changes: object) -> Plan:
    steps = list(plan.steps)
    steps[module] = replace(steps[module], **changes)  # type: ignore[arg-type]
    return replace(plan, steps=tuple(steps))


def with_part(plan: Plan, rank: int, stage: int, **changes: object) -> Plan:
    ranks = list(plan.ranks)
    stages = list(ranks[rank].layer_stages)
    first, *rest = stages[stage].parts
    stages[stage] = replace(stages[stage], parts=(replace(first, **changes), *rest))  # type: ignore[arg-type]
    ranks[rank] = replace(ranks[rank], layer_stages=tuple(stages))
    return replace(plan, ranks=tuple(ranks))


RANK_BREAKERS: tuple[tuple[str, Callable[[Plan], Plan]], ...] = (
    ("shares cover", lambda plan: with_part(plan, 2, 0, first=0)),
    ("shares cover", lambda plan: with_part(plan, 1, 2, rows=8, group=8)),
    ("columns follow rows", lambda plan: with_part(plan, 3, 0, first=0)),
    ("steps fit", lambda plan: replace(plan, steps=plan.steps[:-1])),
    ("steps fit", lambda plan: with_step(plan, 7, sends=True)),
    ("steps fit", lambda plan: with_step(plan, 1, sends=False)),
    ("steps fit", lambda plan: with_step(plan, 2, folds=3)),
    ("slots suffice", lambda plan: replace(plan, slots=plan.slots - 1)),
)


def swapped(plan: Plan, one: int, other: int) -> Plan:
    stages = list(plan.ranks[0].layer_stages)
    stages[one], stages[other] = stages[other], stages[one]
    return with_rank(plan, layer_stages=tuple(stages))


def segments_of(plan: Plan) -> tuple[Segment, ...]:
    library = plan.ranks[0].library
    assert library is not None
    return library.segments


SPARSE_BREAKERS: tuple[tuple[str, Callable[[Plan], Plan]], ...] = (
    ("library holds experts", lambda plan: with_rank(plan, library=None)),
    ("library holds experts", lambda plan: with_library(plan, chosen=6)),
    ("library holds experts", lambda plan: with_library(plan, chosen=3)),
    ("library holds experts", lambda plan: with_library(plan, layers=2)),
    ("library holds experts", lambda plan: with_library(plan, segments=segments_of(plan)[::-1])),
    (
        "library holds experts",
        lambda plan: with_library(
            plan, segments=tuple(replace(each, offset=4) for each in segments_of(plan))
        ),
    ),
    ("library holds experts", lambda plan: with_library(plan, expert_bytes=64)),
    ("chosen before routed", lambda plan: swapped(plan, 2, 3)),
    ("tape holds its tiles", lambda plan: with_stage(plan, 3, lambda stage: replace(stage, routed=0))),
)


def test_a_plan_with_experts_breaks_no_rule() -> None:
    assert violations(sparse_plan()) == []


@pytest.mark.parametrize(("name", "breaker"), SPARSE_BREAKERS)
def test_breaking_a_rule_of_experts_is_noticed(name: str, breaker: Callable[[Plan], Plan]) -> None:
    assert name in {rule.name for rule, _ in violations(breaker(sparse_plan()))}


def test_a_token_reads_the_experts_that_it_passes_and_memory_holds_all() -> None:
    plan = sparse_plan()
    library = plan.ranks[0].library
    assert library is not None
    gate_up, down = plan.ranks[0].routed_stages
    expert = gate_up.tiles * gate_up.tile_bytes + down.tiles * down.tile_bytes
    assert 5 * 3 * expert <= library.bytes < 5 * 3 * (expert + 2 * 64)
    assert plan.token_bytes(0) == plan.tape_bytes + plan.small_bytes + library.bytes * 2 // 5
    assert plan.weight_bytes >= plan.tape_bytes + library.bytes
    assert library.address(2, 4, "down") == (2 * 5 + 4) * library.expert_bytes + library.segments[1].offset


def test_a_plan_of_several_ranks_breaks_no_rule() -> None:
    assert violations(several_ranks()) == []


@pytest.mark.parametrize(("name", "breaker"), RANK_BREAKERS)
def test_breaking_a_rule_of_ranks_is_noticed(name: str, breaker: Callable[[Plan], Plan]) -> None:
    assert name in {rule.name for rule, _ in violations(breaker(several_ranks()))}


def test_every_rule_has_a_breaker() -> None:
    assert set(BREAKERS) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", BREAKERS)
def test_breaking_a_rule_is_noticed(name: str) -> None:
    broken = BREAKERS[name](good_plan())
    assert name in {rule.name for rule, _ in violations(broken)}
    with pytest.raises(PlanError, match="breaks the rule"):
        verify(broken)


def test_digest_names_the_schedule() -> None:
    plan = good_plan()
    assert plan.digest == good_plan().digest
    assert plan.digest != BREAKERS["whole units"](plan).digest
