"""Pieces on their way to a fake GPU: all arrive, each is told in its turn, and a bad one ends the rest."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from monotape.backends.cuda import staging
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.cuda.staging import Piece, Staging
from monotape.errors import CheckpointError
from monotape.weights.tapes import Bytes
from waiting import PATIENCE_S

COUNT, BYTES = 67, 35


def fill(number: int, out: Bytes) -> None:
    out[:] = number


def fail(out: Bytes) -> None:
    raise CheckpointError("no number")


@pytest.mark.parametrize("threads", [1, 5])
def test_every_piece_arrives_and_is_told_in_order(threads: int) -> None:
    with fake_gpu(FakeCuda()):
        memory = DeviceMemory(COUNT * BYTES)
        pieces = [Piece(memory, number * BYTES, BYTES, partial(fill, number)) for number in range(COUNT)]
        with Staging(threads) as moving:
            told = list(moving.move(pieces))
        found = memory.read(np.empty((COUNT, BYTES), np.uint8))
    assert told == list(range(1, COUNT + 1))
    assert np.array_equal(found, np.repeat(np.arange(COUNT)[:, np.newaxis], BYTES, axis=1))


def test_a_piece_that_fails_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before it is told; what has not begun never does."""
    monkeypatch.setattr(staging, "_cores", lambda: 2)
    begun: list[int] = []
    told: list[int] = []
    given_up = threading.Event()

    def held(number: int, out: Bytes) -> None:
        begun.append(number)
        assert given_up.wait(PATIENCE_S)

    def move(pieces: list[Piece]) -> None:
        with Staging(16) as moving:
            shutdown = moving._pool.shutdown

            def end(**options: bool) -> None:
                shutdown(wait=False, **options)
                given_up.set()
                shutdown()

            monkeypatch.setattr(moving._pool, "shutdown", end)
            told.extend(moving.move(pieces))

    with fake_gpu(FakeCuda()) as gpu:
        memory = DeviceMemory(BYTES)
        packs = [*[partial(fill, 7)] * 3, fail, *(partial(held, number) for number in range(40))]
        with pytest.raises(CheckpointError, match="no number"):
            move([Piece(memory, 0, BYTES, pack) for pack in packs])
        memory.close()
        assert gpu.used == 0
    assert told == [1, 2, 3]
    assert len(begun) <= 2


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_cores", lambda: 3)
    seen: set[int] = set()
    together = threading.Barrier(3)

    def note(out: Bytes) -> None:
        together.wait(PATIENCE_S)  # three at a time, no fewer
        seen.add(threading.get_ident())

    with fake_gpu(FakeCuda()):
        memory = DeviceMemory(BYTES)
        with Staging(16) as moving:
            assert list(moving.move([Piece(memory, 0, BYTES, note)] * 9))[-1] == 9
    assert len(seen) == 3
