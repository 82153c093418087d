"""The kinds of feed-forward block: dense, or experts of which a token reads a few."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.models import experts as runnable
from monotape.models.dense import MAX_WIDTH
from monotape.planner.config_fields import ConfigFields
from monotape.planner.shape import FFN, ROUTED, ROUTER, SHARED, Part

MAX_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One layer's feed-forward block."""

    parts: tuple[Part, ...]
    stages: int


def dense(fields: ConfigFields, name: str = "intermediate_size") -> FeedForward:
    """Gate, up and down."""
    width, inner = fields.integer("hidden_size", 1, MAX_WIDTH), fields.integer(name, 1, MAX_WIDTH)
    biases = 2 * inner + width if fields.flag("mlp_bias", False) else 0
    return FeedForward((Part(FFN, 3 * width * inner, biases),), stages=2)


def plain(fields: ConfigFields) -> FeedForward:
    """Two matrices with biases (Starcoder2)."""
    width, inner = (
        fields.integer("hidden_size", 1, MAX_WIDTH),
        fields.integer("intermediate_size", 1, MAX_WIDTH),
    )
    biases = inner + width if fields.flag("use_bias", True) else 0
    return FeedForward((Part(FFN, 2 * width * inner, biases),), stages=2)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's config names the sizes of its experts."""

    count: str
    chosen: str
    inner: str = "moe_intermediate_size"
    shared_count: str | None = None  # shared experts of `inner` each
    shared_inner: str | None = None  # or one of this size


def chosen_experts(fields: ConfigFields, names: runnable.ExpertNames, *, biases: bool) -> FeedForward:
    """A router and experts of a family that the engine runs."""
    found = names.read(fields)
    width, inner = fields.integer("hidden_size", 1, MAX_WIDTH), fields.integer(names.inner, 1, MAX_WIDTH)
    router = Part(ROUTER, width * found.count, found.count if biases else 0)
    vectors = 2 * inner + width if biases else 0
    routed = Part(ROUTED, 3 * width * inner, vectors, found.count, found.chosen)
    return FeedForward((router, routed), stages=3)


def experts(
    fields: ConfigFields, names: ExpertNames, *, shared_gate: bool = False, router_vectors: int = 0,
    latent: int | None = None,
) -> FeedForward:  # fmt: skip
    """A router, the experts it chooses from, and those that every token passes.
    `latent`: experts work at this width, between a projection down and one up (K3)."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    inner = fields.integer(names.inner, 1, MAX_WIDTH)
    count = fields.integer(names.count, 1, MAX_EXPERTS)
    chosen = fields.integer(names.chosen, 1, MAX_EXPERTS)
    if chosen > count:
        raise fields.wrong(names.chosen, f"there are only {count} experts")
    expert_width = latent or width
    projections = 0 if latent is None else 2 * width * latent
    routed = Part(ROUTED, 3 * expert_width * inner, 0, count, chosen)
    router = Part(ROUTER, width * count, router_vectors)
    shared = _shared_inner(fields, names, inner)
    beside = 3 * width * shared + projections + (width if shared_gate and shared else 0)
    extra = (Part(SHARED, beside, latent or 0),) if beside else ()
    return FeedForward((router, routed, *extra), stages=3)


def _shared_inner(fields: ConfigFields, names: ExpertNames, inner: int) -> int:
    if names.shared_count is not None:
        return inner * (fields.optional_integer(names.shared_count, 0, MAX_EXPERTS) or 0)
    if names.shared_inner is not None:
        return fields.optional_integer(names.shared_inner, 0, MAX_WIDTH) or 0
    return 0
