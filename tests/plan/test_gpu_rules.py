"""Every rule of a GPU plan, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.errors import PlanError
from monotape.plan.formats import Format
from monotape.plan.gpu import GpuPlan, GpuRank, MatrixStage
from monotape.plan.gpu_rules import GPU_RULES, verify, violations
from plan.plans import spec


def good_plan(ranks: int = 1) -> GpuPlan:
    model = spec("LlamaForCausalLM", 4, 192, 12, 4, 16, 384, 1024, windows=(32, None) * 2)
    return gpu_plan(model, 9, 160, tp=ranks)


def with_rank(**changes: Any) -> GpuPlan:
    plan = good_plan()
    return replace(plan, ranks=(replace(plan.ranks[0], **changes),))


def rank() -> GpuRank:
    return good_plan().ranks[0]


def with_entry(name: str, index: int, **changes: Any) -> GpuPlan:
    """One entry of a table of the rank changed."""
    table = list(getattr(rank(), name))
    table[index] = replace(table[index], **changes)
    return with_rank(**{name: tuple(table)})


def with_stage(index: int, **changes: Any) -> GpuPlan:
    """One stage of all kinds changed."""
    kinds = []
    for kind in rank().kinds:
        stages = list(kind.stages)
        assert isinstance(stages[index], MatrixStage)
        stages[index] = replace(stages[index], **changes)
        kinds.append(replace(kind, stages=tuple(stages)))
    return with_rank(kinds=tuple(kinds))


def reset_of(buffer: str) -> int:
    return [reset.buffer for reset in rank().resets].index(buffer)


def other_matrices() -> GpuPlan:
    first, second = rank().kinds
    return with_rank(kinds=(first, replace(second, stages=second.stages[:-1])))


BROKEN: dict[str, tuple[Callable[[], GpuPlan], str]] = {
    "layers have kinds": (lambda: with_rank(layer_kinds=(0, 1, 0, 2)), "a kind that there is not"),
    "kinds share matrices": (other_matrices, "has other matrices"),
    "products fit": (lambda: with_stage(0, k=rank().matrices[0].k + 32), "is not its product's"),
    "vectors exist": (lambda: with_stage(0, gain="a_norm"), "there is no vector a_norm"),
    "buffers hold": (lambda: with_entry("buffers", 0, words=3), "does not hold the 192 values"),
    "buffers apart": (lambda: with_entry("buffers", 1, start=1), "starts at word 1"),
    "written before read": (lambda: with_stage(0, reads="activation"), "reads activation before anything wrote it"),
    "every buffer is reset": (lambda: with_rank(resets=rank().resets[1:]), "is reset 0 times"),
    "resets wait": (
        lambda: with_entry("resets", reset_of("after_output"), at="down", turns=0), "others may still read it",
    ),
    "resets come in time": (lambda: with_entry("resets", reset_of("qkv"), turns=2), "too late for the next use"),
    "listed together": (lambda: with_entry("resets", reset_of("attended"), listed=False), "only a list knows"),
    "pages hold tiles": (lambda: with_entry("products", 0, tiles_in_page=1000), "do not fit a page"),
    "ring fits": (lambda: with_rank(pages=replace(rank().pages, ring=99)), "shared memory would take"),
    "kv is shared": (lambda: with_rank(kv=replace(rank().kv, format=Format.F16)), "KV is kept as f16"),
    "cuts cover": (lambda: with_rank(prefill=replace(rank().prefill, chunk=1 << 20)), "a chunk has"),
    "inbox for peers": (
        lambda: with_rank(links=replace(rank().links, regions=good_plan(2).ranks[0].links.regions)),
        "a single rank has an inbox",
    ),
    "rows fit": (lambda: with_rank(rows_a_pass=5), "a pass of 5 rows"),
}  # fmt: skip


def test_good_plans_break_no_rule() -> None:
    assert violations(good_plan()) == []
    assert violations(good_plan(2)) == []


def test_buffers_of_all_rows_of_a_pass_are_apart() -> None:
    """Rows follow each other, each with all its buffers, and candidates follow the last."""
    model = spec("LlamaForCausalLM", 4, 192, 12, 4, 16, 384, 1024)
    plan = gpu_plan(model, 9, 160, tuning=Tuning(rows=3))
    assert violations(plan) == []
    own = plan.ranks[0]
    for broken in (
        replace(own, rows_a_pass=4),  # the last row lies over the candidates
        replace(own, rows_a_pass=2),
        replace(own, buffers=(*own.buffers[:-1], replace(own.buffers[-1], start=own.row_words))),
    ):
        found = violations(replace(plan, ranks=(broken,)))
        assert any(rule.name == "buffers apart" and "starts at word" in text for rule, text in found), found


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str) -> None:
    make, what = BROKEN[rule]
    found = violations(make())
    assert any(broken.name == rule and what in text for broken, text in found), found
    with pytest.raises(PlanError, match="breaks the rule"):
        verify(make())


def test_attention_does_not_prove_that_other_heads_were_read() -> None:
    """`output` with a word of one head follows no reader of another head's queries."""
    listed = rank().resets[reset_of("after_output")]
    plan = with_entry("resets", reset_of("qkv"), at="output", turns=0, listed=listed.listed)
    with pytest.raises(PlanError, match="qkv is reset at output, where others may still read it"):
        verify(plan)


def test_every_rule_has_a_test() -> None:
    assert set(BROKEN) == {rule.name for rule in GPU_RULES}
