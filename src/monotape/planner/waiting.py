"""How long requests wait for one of several replicas: the M/G/k estimate, for users who think between requests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_LARGE = 1e200


@dataclass(frozen=True, slots=True)
class Traffic:
    """Users who read and think for `think_s` on average, then send a request that takes one of `service_s`."""

    users: int
    think_s: float
    service_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.service_s)

    @property
    def variation(self) -> float:
        """The squared coefficient of variation of the service times: 0 if all are equal, 1 if exponential."""
        return statistics.pvariance(self.service_s) / self.mean_s**2


def waits(replicas: int, rate: float, mean_s: float) -> float:
    """Erlang's C: the share of requests that find all replicas busy, where they come at `rate` a second."""
    load = rate * mean_s
    if load >= replicas:
        return 1.0
    blocked = 1.0  # Erlang's B, by its recurrence: no factorial overflows
    for number in range(1, replicas + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1 - load / replicas * (1 - blocked))


def open_wait_s(replicas: int, rate: float, mean_s: float, variation: float) -> float:
    """The mean wait of M/G/k by Allen and Cunneen: that of M/M/k, scaled by how much service times vary."""
    spare = replicas / mean_s - rate
    if spare <= 0:
        return float("inf")
    return waits(replicas, rate, mean_s) / spare * (1 + variation) / 2


def mean_wait_s(traffic: Traffic, replicas: int) -> float:
    """The mean wait of these users.

    Users who wait send nothing, so requests come more slowly the longer the queue is. M/M/k with a finite number of
    users has an exact solution; it is scaled as in `open_wait_s`. Where all replicas are always busy it no longer
    matters how much service times vary: the users share what the replicas can do.
    """
    users, think_s, mean_s = traffic.users, traffic.think_s, traffic.mean_s
    saturated = users * mean_s / replicas - mean_s - think_s
    if think_s == 0:
        return max(0.0, saturated)
    weights = [1.0]  # of the states with 0, 1, ... requests, relative to each other
    for present in range(users):
        weights.append(weights[-1] * (users - present) * mean_s / think_s / min(present + 1, replicas))
        if weights[-1] > _LARGE:
            weights = [weight / _LARGE for weight in weights]
    waiting = sum(max(0, present - replicas) * weight for present, weight in enumerate(weights))
    running = sum(min(present, replicas) * weight for present, weight in enumerate(weights))
    return max(waiting / running * mean_s * (1 + traffic.variation) / 2, saturated)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
