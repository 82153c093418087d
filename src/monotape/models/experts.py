"""Experts: how a router chooses among the feed-forward blocks of a layer, and how their outputs are added up.

The definition, which every backend follows for each row:

1. The router's logits are a product like any other, plus its bias where the family has one.
2. The `chosen` experts with the highest logits are taken. Of equal logits the lower expert index wins.
3. Their weights are a softmax over the chosen logits, or over all logits (`Softmax`), in float32.
4. Each chosen expert computes weight * (down(gated(gate, up)) + bias).
5. These outputs are added in the order of the expert index, the lowest first, and their sum goes into the residual.

A softmax over all logits that is then renormalised over the chosen ones is the softmax over the chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from monotape.models.fields import Fields

MAX_EXPERTS = 1 << 12


class Softmax(Enum):
    """The logits over which the weights of chosen experts add up to 1."""

    CHOSEN = "chosen"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of every layer."""

    count: int
    chosen: int  # by each token
    softmax: Softmax = Softmax.CHOSEN


@dataclass(frozen=True, slots=True)
class Gating:
    """gate * sigmoid(alpha * gate) * (up + shift), after gate <= limit and -limit <= up <= limit."""

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0


SILU = Gating()


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's config names its experts. Defaults are those of transformers where a file leaves a field out."""

    count: tuple[str, ...]  # every name in use; those that a file has must agree
    chosen: tuple[str, ...]
    inner: str = "intermediate_size"  # the width of an expert
    default_count: int = 8
    default_chosen: int = 2
    softmax: Callable[[Fields], Softmax] = lambda fields: Softmax.CHOSEN

    def read(self, fields: Fields) -> Experts:
        count = _agreed(fields, self.count, MAX_EXPERTS, self.default_count)
        chosen = _agreed(fields, self.chosen, MAX_EXPERTS, self.default_chosen)
        if chosen > count:
            raise fields.wrong(self.chosen[0], f"there are only {count} experts")
        return Experts(count, chosen, self.softmax(fields))


def _agreed(fields: Fields, names: tuple[str, ...], high: int, default: int) -> int:
    found = {name: value for name in names if (value := fields.optional_integer(name, 1, high)) is not None}
    if len(set(found.values())) > 1:
        first, other = list(found)[:2]
        raise fields.wrong(first, f"{other} is {found[other]}")
    return next(iter(found.values()), default)
