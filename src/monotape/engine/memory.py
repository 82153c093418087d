"""Does a model fit into the machine's memory? It is refused before it is loaded, with the numbers and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from monotape.errors import ResourceError
from monotape.plan.types import Plan

_STEP = (
    256  # positions; a context that is proposed is a multiple of it, and a shorter one is not worth proposing
)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of the weights, and of the KV of one conversation that is as long as it must be able to get."""

    weights: int
    position: int  # bytes of KV that a position takes
    context: int
    least: int | None = None  # positions that must fit; None: the whole context

    @classmethod
    def of(cls, plan: Plan, least: int | None = None) -> Need:
        return cls(plan.weight_bytes, sum(rank.kv.position_bytes for rank in plan.ranks), plan.context, least)

    @property
    def positions(self) -> int:
        return self.context if self.least is None else self.least

    @property
    def kv(self) -> int:
        return self.position * self.positions

    def context_in(self, available: int) -> int:
        """The longest context that fits beside the weights; 0 where there is none that is worth having."""
        fits = max(0, available - self.weights) // self.position
        return self.context if fits >= self.context else fits // _STEP * _STEP


def require_memory(need: Need, available: int | None, others: Iterable[tuple[str, Need]]) -> None:
    """Memory is planned before it is taken: too little is an error with the numbers, not a killed process.

    `available`: None where the system does not say. `others`: settings, as a hint says them, and what the model needs
    with them, the most precise first. They are looked at only if the model does not fit.
    """
    if available is None or need.weights + need.kv <= available:
        return
    raise ResourceError(
        f"Weights and KV need {(need.weights + need.kv) / 1e9:.2f} GB of memory and {available / 1e9:.2f} GB are "
        f"available: weights {need.weights / 1e9:.2f}, KV of {need.positions:,} positions {need.kv / 1e9:.2f}.",
        _remedy(need, available, others),
    )


def _remedy(need: Need, available: int, others: Iterable[tuple[str, Need]]) -> str:
    """A setting with which the model fits."""
    if context := need.context_in(available):
        return f"Use --max-model-len {context}, or free some memory."
    for setting, other in others:
        if other.weights < need.weights and (context := other.context_in(available)):
            shorter = "" if context == other.context else f" and --max-model-len {context}"
            return f"{setting}{shorter}: the weights take {other.weights / 1e9:.2f} GB then. Or free some memory."
    return "Use a smaller model, or free some memory."
