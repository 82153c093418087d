"""Users and replicas, request by request: what the formula of waiting.py leaves out can be seen here."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from monotape.planner.waiting import Traffic

REQUESTS = 20_000
_WARM_UP = 0.1  # of the requests, which find empty queues and do not count


@dataclass(slots=True, eq=False)
class _Replica:
    number: int
    busy: bool = False
    homes: int = 0  # conversations that it keeps
    waiting: deque[tuple[float, int]] = field(default_factory=deque)  # (when it came, whose it is)

    @property
    def requests(self) -> int:
        return self.busy + len(self.waiting)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Waits in seconds, and what the replicas did."""

    waits_s: list[float]
    busy_share: float
    requests_a_second: float


class Simulation:
    """Thinking times are exponential. `queue` is None where one queue serves all replicas; otherwise a conversation
    stays at its replica until so many wait there, as the cluster's router has it.
    """

    def __init__(self, traffic: Traffic, replicas: int, queue: int | None, seed: int = 1) -> None:
        self._traffic, self._queue, self._random = traffic, queue, random.Random(seed)
        self._replicas = [_Replica(number) for number in range(replicas)]
        self._shared: deque[tuple[float, int]] = deque()
        self._homes: dict[int, _Replica] = {}
        self._events: list[
            tuple[float, int, int, int]
        ] = []  # (time, order, user, replica that ends; -1: a request)
        self._count = 0
        self._waits: list[float] = []
        self._worked_s = 0.0

    def run(self, requests: int = REQUESTS) -> Simulated:
        for user in range(self._traffic.users):
            self._later(self._think_s(), user, -1)
        now = began = 0.0
        skipped = int(requests * _WARM_UP)
        while len(self._waits) < requests:
            now, _, user, replica = heapq.heappop(self._events)
            if replica < 0:
                self._arrive(now, user)
            else:
                self._end(now, replica)
                self._later(now + self._think_s(), user, -1)
            if len(self._waits) <= skipped:
                began, self._worked_s = now, 0.0
        counted, spent = self._waits[skipped:], now - began
        busy = self._worked_s / spent / len(self._replicas)
        return Simulated(counted, min(1.0, busy), len(counted) / spent)

    def _arrive(self, now: float, user: int) -> None:
        if self._queue is None:
            free = next((replica for replica in self._replicas if not replica.busy), None)
            if free is None:
                self._shared.append((now, user))
            else:
                self._serve(now, now, user, free)
            return
        replica = self._home(user, self._queue)
        if replica.busy:
            replica.waiting.append((now, user))
        else:
            self._serve(now, now, user, replica)

    def _home(self, user: int, queue: int) -> _Replica:
        home = self._homes.get(user)
        if home is None or home.requests > queue:
            chosen = min(self._replicas, key=lambda replica: (replica.requests, replica.homes))
            chosen.homes += 1
            if home is not None:
                home.homes -= 1
            self._homes[user] = home = chosen
        return home

    def _serve(self, now: float, came: float, user: int, replica: _Replica) -> None:
        replica.busy = True
        self._waits.append(now - came)
        took = self._random.choice(self._traffic.service_s)
        self._worked_s += took
        self._later(now + took, user, replica.number)

    def _end(self, now: float, index: int) -> None:
        replica = self._replicas[index]
        replica.busy = False
        waiting = self._shared if self._queue is None else replica.waiting
        if waiting:
            came, user = waiting.popleft()
            self._serve(now, came, user, replica)

    def _think_s(self) -> float:
        return self._random.expovariate(1 / self._traffic.think_s) if self._traffic.think_s else 0.0

    def _later(self, when: float, user: int, replica: int) -> None:
        self._count += 1  # of two events at one time the earlier one comes first
        heapq.heappush(self._events, (when, self._count, user, replica))
