"""Lets one request at a time through to the engine, a few wait in order, and sends the rest away."""

from __future__ import annotations

import asyncio
import collections
import math
import time

_MEMORY = 0.3  # weight of the newest request in the running mean of how long one takes


class QueueFull(Exception):
    """Too many are waiting. `retry_after_s` is when a place is likely to be free."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(waiting)
        self.waiting, self.retry_after_s = waiting, retry_after_s


class Gate:
    """First come, first served."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._busy = False
        self._mean_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return int(self._busy)

    def check(self) -> None:
        """Sends those away for whom there is no place now, before anything is done for them."""
        if self._busy and len(self._waiting) >= self._max_waiting:
            raise QueueFull(len(self._waiting), max(1, math.ceil(self._mean_s)))

    def reserve(self) -> Turn:
        """A place, at once or in the queue; nothing is awaited, so a full queue is known before an answer begins."""
        self.check()
        if not self._busy:
            self._busy = True
            return Turn(self, None)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        return Turn(self, place)

    def leave(self, place: asyncio.Future[None] | None, took_s: float | None) -> None:
        """Gives a place back. `took_s` is None for one whose turn had not come."""
        if place in self._waiting:
            self._waiting.remove(place)  # type: ignore[arg-type]
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

    def __init__(self, gate: Gate, place: asyncio.Future[None] | None) -> None:
        self._gate, self._place = gate, place
        self._entered: float | None = None
        self._left = False

    async def __aenter__(self) -> Turn:
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
        if not self._left:
            self._left = True
            took_s = None if self._entered is None else time.monotonic() - self._entered
            self._gate.leave(self._place, took_s)
