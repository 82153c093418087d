"""A conversation's beginning, copied: both conversations go on with the bits that they would have had alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cpu_cases import cpu, ids, reference
from backends.fake_cuda import FakeCuda, fake_gpu
from families import Case, make_checkpoint
from monotape.backends.cpu.sequence import RankKv
from monotape.backends.cuda.ranked import RankedSequence
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.protocol import Backend, Job
from monotape.errors import ResourceError
from monotape.plan.formats import Format
from monotape.plan.gpu import KvUnits

BEGINNING, FIRST, SECOND = tuple(range(3, 40)), (50, 51, 52), (60, 61)


@pytest.mark.parametrize("tp", [None, 2])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_two_conversations_with_one_beginning(tmp_path: Path, name: str, tp: int | None) -> None:
    folder = make_checkpoint(Case("copied", "llama", {"head_dim": 16}), tmp_path / "model")
    with cpu(folder, tp=tp) if name == "cpu" else nullcontext(reference(folder, tp=tp)) as backend:
        go_on_together(backend)


def go_on_together(backend: Backend) -> None:
    def alone(end: tuple[int, ...]) -> list[int]:
        return ids(list(backend.start(Job((*BEGINNING, *end), 0, 8), backend.new_sequence())))

    first, second = backend.new_sequence(), backend.new_sequence()
    told = ids(list(backend.start(Job((*BEGINNING, *FIRST), 0, 8), first)))
    second.copy_from(first, len(BEGINNING))
    assert second.length == len(BEGINNING)
    other = ids(list(backend.start(Job((*BEGINNING, *SECOND), len(BEGINNING), 8), second)))
    assert (told, other) == (alone(FIRST), alone(SECOND))
    more = (*BEGINNING, *FIRST, *told, 70)
    went_on = ids(list(backend.start(Job(more, first.length, 4), first)))
    assert went_on == ids(list(backend.start(Job(more, 0, 4), backend.new_sequence())))


def test_units_of_a_gpu_are_copied_whole() -> None:
    kv = KvUnits(layers=2, kv_heads=3, head_dim=16, format=Format.BF16, units_per_split=1, splits=1)
    with fake_gpu(FakeCuda()):
        first, second = CudaSequence(kv, 8192), CudaSequence(kv, 8192)
        first.reserve(4000)
        first.length = 3000
        assert first._memory is not None
        filled = np.random.default_rng(1).integers(0, 256, first.bytes, np.uint8)
        first._memory.write(filled)
        second.copy_from(first, 1000)
        assert second._memory is not None and second.length == 1000
        seen = second._memory.read(np.empty(second.bytes, np.uint8))
    whole = 32 * kv.unit_bytes  # of 1,000 positions
    copied, rest = np.split(seen.reshape(6, -1), [whole], axis=1)
    assert np.array_equal(copied, filled.reshape(6, -1)[:, :whole])
    assert not rest.any()


def test_a_copy_with_room_on_a_gpu_is_made_once() -> None:
    kv = KvUnits(layers=2, kv_heads=3, head_dim=16, format=Format.BF16, units_per_split=1, splits=1)
    with fake_gpu(FakeCuda()):
        first, second = CudaSequence(kv, 8192), CudaSequence(kv, 8192)
        first.reserve(4000)
        first.length = 3000
        second.reserve(5000)
        made = second.pointer
        second.copy_from(first, 3000)
        second.reserve(5000)  # the job's own
        assert second.pointer == made


def test_a_sequence_of_a_gpu_shrinks_to_the_units_that_it_uses() -> None:
    kv = KvUnits(layers=2, kv_heads=3, head_dim=16, format=Format.BF16, units_per_split=1, splits=1)
    with fake_gpu(FakeCuda()):
        sequence = CudaSequence(kv, 8192)
        assert not sequence.shrink()
        sequence.reserve(8000)
        sequence.length = 70
        assert sequence._memory is not None
        filled = np.random.default_rng(1).integers(0, 256, sequence.bytes, np.uint8)
        sequence._memory.write(filled)
        assert sequence.shrink() and not sequence.shrink()
        assert (sequence.units, sequence.bytes, sequence.length) == (3, 6 * 3 * kv.unit_bytes, 70)
        seen = sequence._memory.read(np.empty(sequence.bytes, np.uint8))
        assert np.array_equal(seen.reshape(6, -1), filled.reshape(6, -1)[:, : 3 * kv.unit_bytes])
        sequence.reserve(2000)
        again = sequence._memory.read(np.empty(sequence.bytes, np.uint8)).reshape(6, -1)
        assert np.array_equal(again[:, : 3 * kv.unit_bytes], seen.reshape(6, -1))
        assert not again[:, 3 * kv.unit_bytes :].any()
        sequence.length = 1000
        assert not sequence.shrink()  # half of it is used


class Tight:
    """A sequence of 150 units with KV in it, on a GPU that has room for so many."""

    def __init__(self, units: int) -> None:
        kv = KvUnits(layers=2, kv_heads=3, head_dim=16, format=Format.BF16, units_per_split=1, splits=1)
        self.unit, self.gpu = kv.unit_bytes, FakeCuda(memory=units * 6 * kv.unit_bytes)
        with fake_gpu(self.gpu):
            self.sequence = CudaSequence(kv, 8192)
            self.sequence.reserve(32 * 150)
            self.sequence.length = 32 * 150 - 5
            assert self.sequence._memory is not None and self.sequence.units == 150
            self.filled = np.random.default_rng(1).integers(0, 256, self.sequence.bytes, np.uint8)
            self.sequence._memory.write(self.filled)

    def check(self, units: int) -> None:
        """The KV is as it was, with zeros behind it."""
        sequence, held = self.sequence, 150 * self.unit
        assert sequence._memory is not None and (sequence.units, sequence.length) == (units, 32 * 150 - 5)
        seen = sequence._memory.read(np.empty(sequence.bytes, np.uint8)).reshape(6, -1)
        assert np.array_equal(seen[:, :held], self.filled.reshape(6, -1)) and not seen[:, held:].any()


@pytest.mark.parametrize(
    ("room", "units"),
    [(1000, 256), (350, 160), (200, 160)],  # twice as much; what is asked for; that, with nothing beside it
)
def test_a_conversation_grows_as_long_as_it_fits(room: int, units: int) -> None:
    tight = Tight(room)
    with fake_gpu(tight.gpu):
        tight.sequence.reserve(32 * 160)
        tight.check(units)


def test_a_conversation_that_cannot_grow_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tight, real, failed = Tight(200), CudaSequence._new_memory, []
    with fake_gpu(tight.gpu):
        with pytest.raises(ResourceError):
            tight.sequence.reserve(8192)
        tight.check(150)

        def taken_meanwhile(sequence: CudaSequence, units: int) -> Any:
            if units > 150:
                failed.append(units)
                raise ResourceError("The GPU has too little free memory.")
            return real(sequence, units)

        monkeypatch.setattr(CudaSequence, "_new_memory", taken_meanwhile)
        with pytest.raises(ResourceError):
            tight.sequence.reserve(32 * 160)
        tight.check(150)
        assert failed == [256, 160, 160]


def test_sequences_of_several_gpus_shrink_together() -> None:
    kv = KvUnits(layers=2, kv_heads=3, head_dim=16, format=Format.BF16, units_per_split=1, splits=1)
    with fake_gpu(FakeCuda()):
        sequence = RankedSequence([CudaSequence(kv, 8192) for _ in range(2)])
        sequence.reserve(8000)
        for part in sequence.parts:
            part.length = 70
        assert sequence.shrink() and not sequence.shrink()
        assert [part.units for part in sequence.parts] == [3, 3]


@pytest.mark.parametrize("tp", [None, 2])
def test_a_conversation_on_a_cpu_goes_on_after_it_has_shrunk(tmp_path: Path, tp: int | None) -> None:
    folder = make_checkpoint(Case("shrunk", "llama", {"head_dim": 16}), tmp_path / "model")
    with cpu(folder, tp=tp, context=1024) as backend:
        kept, plain = backend.new_sequence(), backend.new_sequence()
        for sequence in (kept, plain):
            told = ids(list(backend.start(Job(BEGINNING, 0, 8), sequence)))
        kept.reserve(1000)
        roomy, length = kept.bytes, kept.length
        assert kept.shrink() and not kept.shrink()
        assert kept.bytes == roomy // 4 == plain.bytes and kept.length == length
        more = (*BEGINNING, *told, 70)
        answers = [ids(list(backend.start(Job(more, length, 20), sequence))) for sequence in (kept, plain)]
        assert answers[0] == answers[1]


def test_a_rank_without_memory_leaves_the_others_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(Case("full", "llama", {"head_dim": 16}), tmp_path / "model")
    with cpu(folder, tp=2, context=1024) as backend:
        sequence = backend.new_sequence()
        told = ids(list(backend.start(Job(BEGINNING, 0, 8), sequence)))
        second, empty = sequence.ranks[1], RankKv.empty

        def scarce(rank: RankKv, capacity: int) -> Any:
            if rank is second:
                raise MemoryError
            return empty(rank, capacity)

        monkeypatch.setattr(RankKv, "empty", scarce)
        before = [rank.bytes for rank in sequence.ranks]
        with pytest.raises(ResourceError, match="The KV of 900 positions"):
            sequence.reserve(900)
        assert [rank.bytes for rank in sequence.ranks] == before
        more = (*BEGINNING, *told, 70)
        went_on = ids(list(backend.start(Job(more, sequence.length, 4), sequence)))
        monkeypatch.undo()
        assert went_on == ids(list(backend.start(Job(more, 0, 4), backend.new_sequence())))
