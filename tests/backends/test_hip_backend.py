"""The HIP backend's host side on a fake runtime, with the kernel for CDNA3 run by the host's machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cpu_cases import distance, ids, reference
from backends.fake_hip import FakeHip, fake_hip
from backends.host_ranks import PLAIN
from backends.host_setups import CASES, CONTEXT, DEADLINE_NS, TOLERANCE
from families import make_checkpoint
from monotape.backends.cuda import driver
from monotape.backends.hip import library as library_module
from monotape.backends.hip.backend import HipBackend, RankedHipBackend, processors, use_hip
from monotape.backends.hip.library import HipError, hip_library
from monotape.backends.hip.runtime import DeviceMemoryResource
from monotape.backends.protocol import Job, drafts_of
from monotape.engine import loading
from monotape.engine.loading import choose_backend, load_backend, planned
from monotape.errors import (
    BackendError,
    BackendUnavailable,
    DeadlineFault,
    ResourceError,
    UsageError,
)
from monotape.models.registry import spec_from_config
from monotape.plan.gpu import GpuPlan
from monotape.plan.gpu_machines import CDNA3
from monotape.weights.open import open_checkpoint

TOKENS = tuple(np.random.default_rng(5).integers(3, 59, 40).tolist())
COHERENT = 0x40000000  # hipHostMallocCoherent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CASES["narrow"], tmp_path_factory.mktemp("hip") / "narrow")


@contextmanager
def loaded(place: Path, hip: FakeHip) -> Iterator[HipBackend]:
    with ExitStack() as stack:
        stack.enter_context(fake_hip(hip))
        checkpoint = open_checkpoint(place)
        spec = spec_from_config(checkpoint.config)
        backend = load_backend("hip", spec, checkpoint, dtype="bf16", context=CONTEXT)
        assert isinstance(backend, HipBackend)
        backend._params.deadline_ns = DEADLINE_NS
        stack.callback(backend.close)
        yield backend


def test_a_request_on_all_compute_units(place: Path) -> None:
    hip = FakeHip(processors=2)
    want = reference(place, CONTEXT)
    with loaded(place, hip) as backend:
        assert backend.name == "hip" and backend.plan.machine.workers == 2
        sequence = backend.new_sequence()
        got = backend.logits(TOKENS[:33], sequence)
        assert distance(got, want.logits(TOKENS[:33], want.new_sequence())) < TOLERANCE
        generation = backend.start(Job(TOKENS[:5], 0, 3, (1000,)), backend.new_sequence())
        assert len(ids(list(generation))) == 3 and generation.finish_reason == "length"
    launches = [call for call in hip.calls if call[0] == "hipModuleLaunchCooperativeKernel"]
    assert [call[2:9] for call in launches] == [(2, 1, 1, 12 * 64, 1, 1, CDNA3.shared_memory)] * 2
    pinned = [call for call in hip.calls if call[0] == "hipHostMalloc"]
    assert pinned and all(call[3] & COHERENT for call in pinned), "mailboxes of a kernel that still runs"
    assert hip.used == sequence.bytes, "all other memory is given back"


def test_drafts_change_nothing(place: Path) -> None:
    """Passes of several rows need a ring: here each has one, and a predicted text is not looked at."""
    with loaded(place, FakeHip(processors=2)) as backend:
        assert backend.gpu_plan.ranks[0].rows_a_pass == 1
        plain = Job(TOKENS[:5], 0, 4, (1000,), drafts=False)
        expected = ids(list(backend.start(plain, backend.new_sequence())))
        generation = backend.start(replace(plain, drafts=True, prediction=expected), backend.new_sequence())
        assert ids(list(generation)) == expected
        assert drafts_of(generation) == (0, 0)


def test_a_word_that_never_comes_ends_at_the_deadline(place: Path) -> None:
    with loaded(place, FakeHip(processors=2)) as backend:
        backend._params.deadline_ns = 2_000_000
        backend.lose_word_of("output")
        with pytest.raises(DeadlineFault, match="waited for"):
            list(backend.start(Job(TOKENS[:5], 0, 3), backend.new_sequence()))


def test_the_sequence_can_be_copied(place: Path) -> None:
    with loaded(place, FakeHip(processors=2)) as backend:
        first = backend.new_sequence()
        backend.logits(TOKENS[:33], first)
        second = backend.new_sequence()
        second.copy_from(first, 33)
        both = [backend.logits(TOKENS[33:35], sequence) for sequence in (first, second)]
        assert np.array_equal(*both)


@pytest.mark.parametrize(
    ("hip", "sentence"),
    [
        (FakeHip(name="AMD Instinct MI250X", capability=(9, 0)), "The GPU is a AMD Instinct MI250X; the kernel is"),
        (FakeHip(devices=0), "No AMD GPU can be used here"),
        (FakeHip(cooperative=0), "does not launch all workers of a kernel together"),
    ],
)  # fmt: skip
def test_other_gpus_are_refused_in_one_sentence(hip: FakeHip, sentence: str) -> None:
    with fake_hip(hip), pytest.raises(BackendUnavailable, match=sentence):
        processors()


def test_too_little_memory_is_said_before_any_is_taken(place: Path) -> None:
    with (
        pytest.raises(ResourceError, match="GB free, but the model needs"),
        loaded(place, FakeHip(memory=1 << 20)),
    ):
        pass


@pytest.mark.parametrize(
    ("call", "code", "kind", "sentence"),
    [
        ("hipMalloc", 2, ResourceError, "too little free memory"),
        ("hipModuleLoadData", 1, BackendError, "The HIP runtime says hipErrorInvalidValue"),
        ("hipModuleLaunchCooperativeKernel", 1, BackendError, "The HIP runtime says hipErrorInvalidValue"),
        ("hipEventQuery", 700, BackendError, "The HIP runtime says hipErrorIllegalAddress"),
        ("hipMemGetInfo", 1, BackendError, "The HIP runtime says hipErrorInvalidValue"),
    ],
)
def test_errors_have_hips_own_names(
    place: Path, call: str, code: int, kind: type[BackendError], sentence: str
) -> None:
    hip = FakeHip(processors=2)
    failing = {call: code, **({"hipEventSynchronize": code} if call == "hipEventQuery" else {})}
    early = call in ("hipMalloc", "hipModuleLoadData", "hipMemGetInfo")
    if early:
        hip.failing.update(failing)
    with pytest.raises(kind, match=sentence):
        load_and_run(place, hip, failing)


def load_and_run(place: Path, hip: FakeHip, failing: dict[str, int]) -> None:
    with loaded(place, hip) as backend:
        hip.failing.update(failing)
        try:
            backend.logits(TOKENS[:3], backend.new_sequence())
        finally:
            hip.failing.clear()


def test_without_the_runtime_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(library_module, "NAMES", ("libamdhip64-that-is-not-here.so",))
    hip_library.cache_clear()
    with pytest.raises(BackendUnavailable, match="HIP runtime is not installed"):
        use_hip()
    assert driver._other is None


def test_two_ranks_on_two_gpus(place: Path) -> None:
    """Inboxes are memory that a running kernel sees other GPUs' stores in; all GPUs may write to all."""
    hip = FakeHip(processors=2, devices=2)
    even = make_checkpoint(PLAIN["llama"], place.parent / "even")  # its ranks share one kernel
    want = reference(even, CONTEXT, tp=2)
    checkpoint = open_checkpoint(even)
    spec = spec_from_config(checkpoint.config)
    with fake_hip(hip):
        backend = load_backend("hip", spec, checkpoint, dtype="bf16", context=CONTEXT, tp=2)
        assert isinstance(backend, RankedHipBackend) and backend.name == "hip"
        assert [type(rank) for rank in backend.ranks] == [HipBackend] * 2
        assert [rank.device for rank in backend.ranks] == [0, 1]
        inboxes = [rank.inbox.memory.pointer for rank in backend.ranks if rank.inbox]
        assert hip.fine == inboxes and len(inboxes) == 2
        assert hip.peers == {(0, 1), (1, 0)}
        for rank in backend.ranks:
            rank._params.deadline_ns = DEADLINE_NS
        got = backend.logits(TOKENS[:33], backend.new_sequence())
        assert distance(got, want.logits(TOKENS[:33], want.new_sequence())) < TOLERANCE
        generation = backend.start(Job(TOKENS[:5], 0, 3, (1000,)), backend.new_sequence())
        assert len(ids(list(generation))) == 3 and generation.finish_reason == "length"
        backend.stop_rank(1)
        with pytest.raises(DeadlineFault, match="Rank 0 waited too long for rank 1"):
            list(backend.start(Job(TOKENS[:5], 0, 3), backend.new_sequence()))
        backend.close()


def test_what_ranks_and_workers_need_is_said_in_a_sentence(place: Path) -> None:
    checkpoint = open_checkpoint(place)
    spec = spec_from_config(checkpoint.config)

    def load(**asked: Any) -> None:
        load_backend("hip", spec, checkpoint, dtype="bf16", context=CONTEXT, **asked)

    with fake_hip(FakeHip()):
        with pytest.raises(BackendUnavailable, match="2 ranks were asked for, but this machine has 1 GPU"):
            load(tp=2)
        with pytest.raises(UsageError, match="The HIP backend has no emulated ranks"):
            load(tp=2, emulate_ranks=True)
        with pytest.raises(UsageError, match="runs on all compute units"):
            load(workers=3)
    with (
        fake_hip(FakeHip(devices=2, connected=False)),
        pytest.raises(BackendUnavailable, match="GPU 0 cannot reach the memory of GPU 1"),
    ):
        load(tp=2)


def test_peers_that_have_access_already_are_no_error() -> None:
    hip = FakeHip(devices=2)
    hip.peers.add((0, 1))
    memory = DeviceMemoryResource(hip.library())
    memory.peer_accessible_by = [1]
    assert memory.peer_accessible_by == [1]
    hip.failing["hipDeviceEnablePeerAccess"] = 1
    with pytest.raises(HipError, match="hipErrorInvalidValue"):
        DeviceMemoryResource(hip.library()).peer_accessible_by = [1]


def test_auto_never_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("auto") != "hip" and choose_backend("hip") == "hip"
    assert choose_backend("hip", "int4") == "hip"
    with pytest.raises(UsageError, match="The hip backend has no kernels for f32 weights"):
        choose_backend("hip", "f32")


def test_a_plan_needs_no_gpu(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(place)
    loading._note.cache_clear()
    plan = planned("hip", spec_from_config(checkpoint.config), checkpoint, context=CONTEXT, workers=304)
    assert isinstance(plan, GpuPlan) and plan.machine is CDNA3 and plan.workers == 304


def test_an_error_keeps_its_code() -> None:
    assert HipError(2, "hipErrorOutOfMemory", "hipMalloc").code == 2
