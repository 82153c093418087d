"""Lets one request at a time through to the engine, lets a few wait in order, and refuses the rest.

A request has its place from the start, while it is rendered, tokenised and its grammar compiled. It lines up when it is
ready, so a slow preparation delays no other request.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import time

_MEMORY = 0.3  # weight of the newest request in the running mean of how long one takes


class QueueFull(Exception):
    """`taken` requests are here already. `retry_after_s` is when a place is likely to be free."""

    def __init__(self, taken: int, retry_after_s: int) -> None:
        super().__init__(taken)
        self.taken, self.retry_after_s = taken, retry_after_s


class Gate:
    """First come, first served."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._preparing = 0
        self._busy = False
        self._mean_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._preparing

    @property
    def running(self) -> int:
        return int(self._busy)

    def check(self) -> None:
        """Raises QueueFull where there is no place, before any work is done."""
        taken = self.running + self.waiting
        if taken > self._max_waiting:
            raise QueueFull(taken, max(1, math.ceil(self._mean_s)))

    def admit(self) -> Turn:
        """A place for a request that is being made ready; QueueFull when there is none."""
        self.check()
        self._preparing += 1
        return Turn(self)

    def line_up(self) -> asyncio.Future[None] | None:
        """From now on its turn can come; None: it has come."""
        self._preparing -= 1
        if not self._busy:
            self._busy = True
            return None
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        return place

    def abandon(self) -> None:
        """Gives the place of a request back that was never ready."""
        self._preparing -= 1

    def leave(self, place: asyncio.Future[None] | None, took_s: float | None) -> None:
        """Gives a place back. `took_s` is None for one whose turn had not come."""
        if place is not None and (place.cancelled() or not place.done()):
            with contextlib.suppress(ValueError):  # _next skips a place as soon as it is cancelled
                self._waiting.remove(place)
            return
        if took_s is not None:
            self._mean_s += _MEMORY * (took_s - self._mean_s)
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


class Turn:
    """A place in the queue, and then the engine to itself until it is left. Leave it even if it was never entered."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._place: asyncio.Future[None] | None = None
        self._entered: float | None = None
        self._lined_up = self._left = False

    def line_up(self) -> None:
        """The request is ready to run. Nothing is awaited."""
        self._place = self._gate.line_up()
        self._lined_up = True

    async def __aenter__(self) -> Turn:
        assert self._lined_up, "only a request that is ready has a turn"
        if self._place is not None:
            try:
                await self._place
            except asyncio.CancelledError:
                self.leave()
                raise
        self._entered = time.monotonic()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        if not self._lined_up:
            self._gate.abandon()
            return
        took_s = None if self._entered is None else time.monotonic() - self._entered
        self._gate.leave(self._place, took_s)
