"""One rank's share of a plan, seen as a plan of its own: what its memory holds."""

from __future__ import annotations

from dataclasses import replace

from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan


def rank_plan(plan: Plan, rank: int) -> Plan:
    """The plan with this rank alone. What all ranks have alike is counted once."""
    ranks = len(plan.ranks)
    if ranks == 1:
        return plan
    return replace(
        plan, ranks=(plan.ranks[rank],), small_bytes=plan.small_bytes // ranks,
        table_bytes=plan.table_bytes // ranks, embedding_bytes=plan.embedding_bytes // ranks,
    )  # fmt: skip


def reads_table(spec: ModelSpec, plan: Plan) -> bool:
    """Whether the embedding is a table of its own: a single rank finds a tied one on its tapes."""
    return not spec.tied or bool(plan.steps)
