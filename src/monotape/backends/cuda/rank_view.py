"""One rank's share of a model, seen as a model of its own: what its kernel is built for, and what its memory holds."""

from __future__ import annotations

from dataclasses import replace

from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan


def rank_spec(spec: ModelSpec, plan: Plan, rank: int) -> ModelSpec:
    """The dimensions that a rank computes: its heads, feed-forward columns and words. Of one rank, the model's."""
    if len(plan.ranks) == 1:
        return spec
    own = plan.ranks[rank]
    qkv, _, gate_up, _ = own.layer_stages
    return replace(
        spec, heads=qkv.parts[0].rows // spec.head_dim, kv_heads=own.kv.kv_heads, ffn=gate_up.parts[0].rows,
        vocab=own.head.parts[0].rows, lanes=None,
    )  # fmt: skip


def rank_plan(plan: Plan, rank: int) -> Plan:
    """The plan with this rank alone. What all ranks have alike is counted once."""
    ranks = len(plan.ranks)
    if ranks == 1:
        return plan
    return replace(
        plan, ranks=(plan.ranks[rank],), small_bytes=plan.small_bytes // ranks,
        table_bytes=plan.table_bytes // ranks, embedding_bytes=plan.embedding_bytes // ranks,
    )  # fmt: skip


def first_id(plan: Plan, rank: int) -> int:
    """Where the rank's words begin in the vocabulary."""
    return plan.ranks[rank].head.parts[0].first


def reads_table(spec: ModelSpec, plan: Plan) -> bool:
    """Whether the embedding is a table of its own: a single rank finds a tied one on its tapes."""
    return not spec.tied or bool(plan.steps)
