"""Copies packed pieces onto the GPU: each thread fills one pinned slot while another is being copied."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from monotape.backends.cuda.driver import (
    DeviceMemory,
    PinnedMemory,
    device_index,
    driver_errors,
    new_event,
    new_stream,
    on_device,
)
from monotape.weights.tapes import Bytes

SLOT_BYTES = 4 << 20  # a piece has a fixed cost in Python, during which threads wait for each other's lock
_SLOTS = 2  # a thread
_TOLD_TOGETHER = 16  # pieces per progress report: a report of each would hold up the threads
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of device memory that is packed and copied at once: at most SLOT_BYTES."""

    memory: DeviceMemory
    offset: int
    bytes: int
    pack: Callable[[Bytes], None]  # fills all of the bytes it is given


class _Lane:
    """One thread's stream, and its slots with events that say when their copies have ended."""

    def __init__(self) -> None:
        self.stream = new_stream()
        self._slots = PinnedMemory(_SLOTS * SLOT_BYTES)
        self._copied = [new_event() for _ in range(_SLOTS)]
        self._turn = 0

    def move(self, piece: Piece) -> None:
        slot, copied = self._turn * SLOT_BYTES, self._copied[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        with driver_errors():
            copied.sync()
        piece.pack(self._slots.view[slot : slot + piece.bytes])
        piece.memory.copy_in(self._slots.pointer + slot, piece.bytes, piece.offset, self.stream)
        with driver_errors():
            self.stream.record(copied)

    def close(self) -> None:
        with driver_errors():
            self.stream.sync()
        self._slots.close()


class Staging:
    """Threads that move pieces. Leaving the `with` block means that every copy has landed, or that one has failed."""

    def __init__(self, threads: int) -> None:
        """At most `threads` threads, and no more than there are cores."""
        self._pool = ThreadPoolExecutor(min(threads, _cores()))
        self._own = threading.local()
        self._device = device_index()
        self._lanes: list[_Lane] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()

    def run(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs other work on the same threads meanwhile."""
        return self._pool.submit(function)

    def move(self, pieces: Sequence[Piece]) -> Iterator[int]:
        """Moves all of them, in order as far as threads allow; yields how many are done, in order."""
        jobs = [self._pool.submit(self._move, piece) for piece in pieces]
        for done, job in enumerate(jobs, start=1):
            if done % _TOLD_TOGETHER == 1:
                wait(jobs[done - 1 : done - 1 + _TOLD_TOGETHER], return_when=FIRST_EXCEPTION)
            job.result()
            yield done

    def _move(self, piece: Piece) -> None:
        with on_device(self._device):
            lane: _Lane | None = getattr(self._own, "lane", None)
            if lane is None:
                lane = self._own.lane = _Lane()
                self._lanes.append(lane)
            lane.move(piece)


def _cores() -> int:
    """Cores that this process may use."""
    affinity: Any = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
