"""How the lanes of a model share what they compute: tensor parallelism, with or without a delay, as one mechanism.

A layer is two modules, attention and feed-forward, counted n = 0, 1, ... through the model. Lane l computes a partial
output o_l of each module from its own residual X_l. docs/delayed-tensor-parallelism.md says what the settings mean and
why; `steps` is the definition that the plan and every backend follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from monotape.plan.types import Step

EARLY = ("scale", "sum")
OWN = ("now", "with sum")
HEADS = ("mean", "sum", "concatenate", "vocabulary")


@dataclass(frozen=True, slots=True)
class Lanes:
    """The residual streams of a model, one per rank, and what they exchange."""

    count: int
    delay: int | None  # modules from a send to its fold; None: no sums after the early modules
    early: str = "scale"  # the modules before anything can arrive: own * sqrt(lanes), or a sum at once
    early_modules: int | None = None  # how many those are; None: as many as the delay
    own: str = "now"  # a lane adds its own partial at once, or only as part of the sum that arrives
    attention: bool = True  # whether attention modules send at all
    feed_forward: bool = True
    head: str = "mean"  # how the head combines the lanes after the final norm
    own_norms: bool = False  # each lane has norm gains of its own

    def __post_init__(self) -> None:
        assert self.count >= 1 and (self.delay is None or self.delay >= 0)
        assert self.early in EARLY and self.own in OWN and self.head in HEADS
        assert self.own == "now" or (self.attention and self.feed_forward and self.delay is not None)

    @property
    def apart(self) -> bool:
        """Whether the lanes' residuals can differ; in plain tensor parallelism and Ladder Residual they never do."""
        return self.count > 1 and self.own == "now" and (self.delay != 0 or not self._all_send)

    @property
    def _all_send(self) -> bool:
        return self.attention and self.feed_forward


def uneven_heads(heads: int, kv_heads: int, ranks: int) -> str:
    """Which heads so many ranks cannot share, and why; empty if they can share all."""
    if heads % ranks:
        return f"{heads} heads evenly"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads: neither number divides the other"
    return ""


def tensor_parallel(ranks: int) -> Lanes:
    """Plain tensor parallelism: every module's sum is folded in before the next module starts."""
    return Lanes(ranks, 0)


def ladder(ranks: int, delay: int = 1) -> Lanes:
    """Ladder Residual: full sums, `delay` modules late, and nothing before them."""
    return Lanes(ranks, delay, own="with sum")


def delayed(lanes: int, delay: int, early: str = "scale") -> Lanes:
    """Delayed Tensor Parallelism as its authors write it down, the delay counted in modules."""
    return Lanes(lanes, delay, early)


def silent(lanes: int) -> Lanes:
    """No communication: lanes meet in the head alone."""
    return Lanes(lanes, None)


def steps(lanes: Lanes, modules: int) -> tuple[Step, ...]:
    """What a rank does after each module, in order; then one step for each sum that is left.

    The steps past the last module compute nothing: they fold sums that are still in flight (Ladder Residual alone).
    """
    delay = lanes.delay
    early = (delay or 0) if lanes.early_modules is None else lanes.early_modules

    def talks(module: int) -> bool:
        return (
            0 <= module < modules
            and delay is not None
            and (lanes.feed_forward if module % 2 else lanes.attention)
        )

    made = []
    for module in range(modules if lanes.own == "now" else modules + (delay or 0)):
        source = module - delay if delay is not None and talks(module - delay) else None
        if lanes.own == "with sum":
            made.append(Step(0.0, module < modules, source, True))
            continue
        folded_later = delay is not None and talks(module) and module + delay < modules
        if module < early and lanes.early == "sum":
            made.append(Step(0.0, True, module, True))
        elif module < early or source is None:
            made.append(Step(math.sqrt(lanes.count), folded_later, None, False))
        else:
            made.append(Step(0.0 if delay == 0 else 1.0, folded_later, source, delay == 0))
    return tuple(made)


def send_lag(schedule: tuple[Step, ...]) -> int:
    """The most sends between a send and its last fold."""
    sent: dict[int, int] = {}
    lag = 0
    for module, step in enumerate(schedule):
        if step.sends:
            sent[module] = len(sent)
        if step.folds is not None:
            lag = max(lag, len(sent) - 1 - sent[step.folds])
    return lag
