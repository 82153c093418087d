"""The host side of several ranks on fake GPUs: where memory lies, how ranks are connected, and what they report."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from families import Case, make_checkpoint
from monotape.backends.cuda import backend as module
from monotape.backends.cuda import driver, ranked
from monotape.backends.cuda.params import ParamsStruct, StatusStruct
from monotape.backends.cuda.ranked import RankedCudaBackend, RankedSequence
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.protocol import Job
from monotape.compiler.gpu import gpu_plan
from monotape.engine.loading import load_backend
from monotape.errors import BackendError, DeadlineFault, ResourceError
from monotape.models.lanes import Lanes, delayed, silent
from monotape.models.registry import spec_from_config
from monotape.plan.gpu import MOST_RANKS
from monotape.weights.open import open_checkpoint
from shapes import SHAPES

CASE = Case(
    "ranked", "llama", {"head_dim": 16, "num_attention_heads": 4, "hidden_size": 52, "tie_word_embeddings": True}
)  # fmt: skip
CONTEXT = 64
WIDTH = 56  # padded to whole tiles
_LENGTH = 2


class RankGpu(FakeCuda):
    """Every launch is over at once, and says that token i is i plus `odd` for the launch of that number."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.launches: list[tuple[int, ParamsStruct]] = []  # the GPU that was current, and the parameters
        self.odd = -1

    @property
    def bindings(self) -> Any:
        real = super().bindings
        launch = real.cuLaunchCooperativeKernel

        def run(*arguments: Any) -> Any:
            result = launch(*arguments)
            params = ParamsStruct.from_buffer_copy(ParamsStruct.from_address(self.launched[-1][-1]))
            for number in range(params.max_tokens):
                ctypes.c_int32.from_address(params.ids + 4 * number).value = number + (
                    len(self.launches) == self.odd
                )
            status = StatusStruct.from_address(params.status)
            status.tokens, status.finish = params.max_tokens, _LENGTH
            self.launches.append((self.current.index, params))
            return result

        real.cuLaunchCooperativeKernel = run
        return real


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CASE, tmp_path_factory.mktemp("ranked"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compile_kernel", lambda header: header.encode())


def load(folder: Path, *, emulated: bool) -> RankedCudaBackend:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    backend = load_backend("cuda", spec, checkpoint, context=CONTEXT, tp=2, emulate_ranks=emulated)
    assert isinstance(backend, RankedCudaBackend)
    return backend


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("emulated", [False, True])
def test_ranks_have_memory_of_their_own_and_reach_each_other(folder: Path, emulated: bool) -> None:
    with fake_gpu(RankGpu(devices=1 if emulated else 2)) as gpu:
        backend = load(folder, emulated=emulated)
        assert backend.plan.machine.workers == (2 if emulated else 5)
        assert [index for index, _ in gpu.loaded] == ([0, 0] if emulated else [0, 1])
        sequence = backend.new_sequence()
        generation = backend.start(Job((3, 5), 0, 4), sequence)
        assert [token.id for token in generation] == [0, 1, 2, 3]
        assert generation.finish_reason == "length"
        assert (sequence.length, [part.length for part in sequence.parts]) == (5, [5, 5])
        (first, one), (second, other) = gpu.launches
        assert (first, second) == (0, 0 if emulated else 1)
        for index, params in gpu.launches:
            where = (params.tapes, params.exchange, params.kv, params.embedding, params.ranks.own.sums)
            assert [gpu.device_of[address] for address in where] == [index] * 5
        assert (one.ranks.rank, other.ranks.rank) == (0, 1)
        assert (one.ranks.peers, other.ranks.peers) == (0b10, 0b01)
        assert (one.ranks.first_id, other.ranks.first_id) == (0, 64)
        assert one.ranks.inbox[1].sums == other.ranks.own.sums
        assert other.ranks.inbox[0].sums == one.ranks.own.sums + 8 * WIDTH
        assert other.ranks.inbox[0].choices == one.ranks.own.choices + 8 * 4
        assert len({one.tapes, other.tapes}) == len({one.exchange, other.exchange}) == 2
        assert (one.embedding == other.embedding) is emulated  # only read: once on a GPU
        assert other.ranks.inbox[0].rows == one.ranks.own.rows + 4 * WIDTH
        assert other.ranks.inbox[0].meetings == one.ranks.own.meetings + 8
        assert one.chunk == other.chunk == 128
        if not emulated:
            assert [gpu.pools[index].peer_accessible_by for index in (0, 1)] == [[1], [0]]
        del sequence, generation
        backend.close()
        assert gpu.used == 0


@pytest.mark.usefixtures("no_compiler")
def test_numbers_of_a_request_are_the_same_for_all_ranks_and_never_used_again(folder: Path) -> None:
    with fake_gpu(RankGpu()) as gpu:
        backend = load(folder, emulated=True)
        for _ in range(2):
            list(backend.start(Job((3, 5), 0, 4), backend.new_sequence()))
        numbers = [
            (params.ranks.first_send, params.ranks.first_token, params.ranks.first_meeting)
            for _, params in gpu.launches
        ]
        assert numbers[0] == numbers[1]
        assert numbers[2] == numbers[3]
        sends = 2 * backend.spec.layers
        assert numbers[2][0] >= numbers[0][0] + sends * CONTEXT
        assert numbers[2][1] >= numbers[0][1] + CONTEXT
        assert (
            numbers[2][2] >= numbers[0][2] + sends * CONTEXT
        )  # a meeting after each module of each row, at most
        backend.close()


@pytest.mark.parametrize(
    ("name", "ranks", "lanes", "rows", "slots"),
    [
        ("llama-3.1-8b", 2, None, 2048, 2), ("llama-3.1-8b", 8, None, 512, 2),
        ("llama-3.1-8b", 8, delayed(8, 2), 256, 4), ("llama-3.1-8b", 8, silent(8), 1024, 1),
        ("llama-3.1-8b", 8, delayed(8, 32), 128, 33),
    ],
)  # fmt: skip
def test_rows_of_a_pass_follow_from_the_memory_that_they_take(
    name: str, ranks: int, lanes: Lanes | None, rows: int, slots: int
) -> None:
    """As many as a rank has room for, of every peer and of every send that may be on its way."""
    spec = replace(spec_from_config(SHAPES[name]), lanes=lanes)
    plan = gpu_plan(spec, 132, 8192, tp=ranks)
    own = plan.ranks[0]
    assert own.prefill.chunk == rows
    assert own.links.row_slots == slots
    taken = next(region.bytes for region in own.links.regions if region.name == "rows")
    assert taken == slots * rows * ranks * 4096 * 4
    assert taken <= 128 << 20 or rows == 128
    assert own.links.inbox_bytes > taken


@pytest.mark.usefixtures("no_compiler")
def test_what_a_rank_takes_has_been_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and inbox are in the sum that is held against what the GPU has free."""
    planned: list[int] = []
    real = module.memory_plan

    def plan_of(*arguments: Any) -> Any:
        found = real(*arguments)
        planned.append(found.exchange)
        return found

    monkeypatch.setattr(module, "memory_plan", plan_of)
    with fake_gpu(RankGpu()):
        backend = load(folder, emulated=True)
        for rank, working in zip(backend.ranks, planned, strict=True):
            assert rank.inbox is not None
            held = [*rank._row_memories, rank.inbox.memory, *rank.memories_of(["exchange"]).values()]
            assert sum(memory.bytes for memory in held) == working
        backend.close()


@pytest.mark.usefixtures("no_compiler")
def test_ranks_that_disagree_are_a_fault(folder: Path) -> None:
    with fake_gpu(RankGpu()) as gpu:
        backend = load(folder, emulated=True)
        gpu.odd = 1
        sequence = backend.new_sequence()
        with pytest.raises(BackendError, match="Ranks chose different tokens"):
            list(backend.start(Job((3, 5), 0, 4), sequence))
        assert sequence.length == 0
        assert len(list(backend.start(Job((3, 5), 0, 4), sequence))) == 4
        backend.close()


@pytest.mark.usefixtures("no_compiler")
def test_when_one_rank_does_not_fit_the_others_are_given_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = module.CudaBackend.load

    def only_one(*arguments: Any, **settings: Any) -> Any:
        made.append(settings["rank"])
        if settings["rank"] == 1:
            raise ResourceError("The GPU has too little free memory.", "Use a smaller model.")
        return real(*arguments, **settings)

    monkeypatch.setattr(module.CudaBackend, "load", only_one)
    with fake_gpu(RankGpu()) as gpu:
        with pytest.raises(ResourceError, match="too little"):
            load(folder, emulated=True)
        assert made == [0, 1]
        assert gpu.used == 0


@pytest.mark.usefixtures("no_compiler")
def test_a_gpu_without_room_is_named_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ranked, "memory_free_and_total", lambda: ((1 << 30) * (driver.device_index() == 0), 1 << 30)
    )
    monkeypatch.setattr(module.CudaBackend, "load", lambda *arguments, **settings: pytest.fail("loaded"))
    with fake_gpu(RankGpu(devices=2)), pytest.raises(ResourceError, match=r"GPU 1 has 0\.00 GB free"):
        load(folder, emulated=False)


@pytest.mark.usefixtures("no_compiler")
def test_kv_stays_on_the_gpu_of_its_rank(folder: Path) -> None:
    """Also where no launch is being prepared: when a conversation is copied, and when it gives memory back."""
    with fake_gpu(RankGpu(devices=2)) as gpu:
        backend = load(folder, emulated=False)
        first, second = (
            RankedSequence([CudaSequence(rank.gpu_rank.kv, 8192, rank.device) for rank in backend.ranks])
            for _ in range(2)
        )
        assert [part._device for part in backend.new_sequence().parts] == [0, 1]
        first.reserve(4000)
        for part in first.parts:
            part.length = 20
        second.copy_from(first, 20)
        assert first.shrink()
        for sequence in (first, second):
            assert [gpu.device_of[part.pointer] for part in sequence.parts] == [0, 1]
        backend.close()


def test_a_broken_gpu_is_the_fault_that_is_told() -> None:
    """Others wait for it until their deadline, and what its own workers waited for cannot be read any more."""
    late, broken = DeadlineFault("Rank 0 waited too long."), BackendError("The driver says no.")

    def unreadable(fault: DeadlineFault) -> DeadlineFault:
        raise broken

    launches: Any = [SimpleNamespace(fault=fault, tokens=[], filled=0) for fault in (late, broken)]
    for launch in launches:
        launch.start_ns, launch.collect = 0, lambda: True
    backend: Any = SimpleNamespace(name_deadline=unreadable)
    sequence: Any = SimpleNamespace(parts=[SimpleNamespace(clear=lambda: None)] * 2)
    running = ranked.RankedLaunch(backend, launches, sequence)
    assert running.collect() and running.collect() and running.fault is broken


def test_the_driver_has_a_queue_for_every_rank() -> None:
    """The setting precedes the first call of the driver."""
    code = "import os, monotape.backends.cuda.driver; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(said.stdout) >= 2 * MOST_RANKS
