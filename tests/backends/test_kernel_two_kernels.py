"""A model with two kernels: requests take one or the other, and every token and log-probability is the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.host_drafts import SAMPLINGS, Answer, choices_of, plain, predicting
from backends.host_kernel import NeverCompiled, host_gpu
from backends.host_setups import CONTEXT, DEADLINE_NS, SETUPS, VOCAB, checkpoints
from measuring import await_drafts
from monotape.backends.cuda import drafting
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.drafting import DraftingBackend
from monotape.backends.cuda.memory import memory_plan
from monotape.backends.cuda.worth import Worth
from monotape.backends.protocol import Job, KvSequence
from monotape.compiler.gpu import Tuning, drafting_plan, gpu_plan
from monotape.errors import BackendError, ResourceError, UsageError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.open import open_checkpoint

pytestmark = pytest.mark.slow

TEXT = tuple(np.random.default_rng(11).integers(3, VOCAB, CONTEXT).tolist())
Load = Callable[..., DraftingBackend]


class AtOnce(NeverCompiled):
    """The host compiles when the kernel is made."""

    def __init__(self, header: str) -> None:
        self.header = header

    def code(self) -> bytes | None:
        return CudaBackend.compile(self.header)


class Later(AtOnce):
    """It is not there at first."""

    looks = 0

    def code(self) -> bytes | None:
        self.looks += 1
        return super().code() if self.looks > 2 else None


class Failed(NeverCompiled):
    failure = "ptxas: out of patience"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """A setup of SETUPS with both kernels."""
    with ExitStack() as stack:
        stack.enter_context(host_gpu())

        def load(
            setup: str, compiling: type[NeverCompiled] = AtOnce, kv: Format | None = None
        ) -> DraftingBackend:
            monkeypatch.setattr(DraftingBackend, "compiling", compiling)
            case, workers, enough = SETUPS[setup]
            checkpoint = open_checkpoint(place / case)
            spec = spec_from_config(checkpoint.config)
            plan = gpu_plan(spec, workers, CONTEXT, tuning=Tuning(units_per_split=enough), kv_format=kv)
            drafting = drafting_plan(spec, plan)
            assert drafting is not None
            backend = DraftingBackend.load_both(spec, plan, drafting, checkpoint)
            assert isinstance(backend, DraftingBackend)
            backend._params.deadline_ns = DEADLINE_NS
            stack.callback(backend.close)
            return backend

        yield load


def asked(backend: DraftingBackend, job: Job, sequence: KvSequence | None = None) -> Answer:
    generation = backend.start(job, sequence or backend.new_sequence())
    tokens = list(generation)
    return Answer(choices_of(tokens), generation.finish_reason, generation.drafted, generation.accepted)


@pytest.mark.parametrize(
    ("setup", "sampling", "kv"),
    [
        *itertools.product(("two workers", "splits"), ("greedy", "filtered"), (None,)),
        ("two workers", "greedy", Format.FP8),
    ],
)
def test_both_kernels_give_the_same_tokens(load: Load, setup: str, sampling: str, kv: Format | None) -> None:
    backend, job = load(setup, kv=kv), Job(TEXT[:22], 0, 24, **SAMPLINGS[sampling])
    alone = asked(backend, plain(job))
    assert alone.drafted == 0 and backend.drafting is None
    for wrong in (0.0, 0.3):
        drafted = asked(backend, predicting(job, alone.ids, wrong, VOCAB))
        assert drafted.told == alone.told and (drafted.accepted > 0 or wrong > 0)
    assert backend.drafting is not None and backend.kernel.launches == 1


def test_a_conversation_goes_on_in_the_other_kernel(load: Load) -> None:
    backend, first = load("two workers"), Job(TEXT[:8], 0, 12)
    sequence = backend.new_sequence()
    alone = asked(backend, plain(first), sequence)
    text = (*first.prompt, *alone.ids)
    second = Job((*text, *TEXT[30:34]), len(text) - 1, 12)
    expected = asked(backend, plain(second), sequence)
    for turns in ((True, False), (False, True)):
        sequence = backend.new_sequence()
        for drafts, job, what in zip(turns, (first, second), (alone, expected), strict=True):
            told = predicting(job, what.ids, 0, VOCAB) if drafts else plain(job)
            got = asked(backend, told, sequence)
            assert got.told == what.told and (got.accepted > 0) == drafts


def test_requests_take_the_kernel_that_pays(load: Load) -> None:
    backend, job = load("two workers"), Job(TEXT[:8], 0, 20)
    asked(backend, job)
    assert backend.drafting is not None and backend.drafting.kernel.launches == 1  # it finds out
    backend._worth = Worth(tokens=100, passes=100)
    asked(backend, job)
    assert (backend.kernel.launches, backend.drafting.kernel.launches) == (1, 1)
    asked(backend, replace(job, prediction=TEXT[:4]))
    assert (backend.kernel.launches, backend.drafting.kernel.launches) == (1, 2)


def test_masks_and_hints_go_to_the_kernel_that_checks_drafts(load: Load) -> None:
    backend = load("two workers")
    generation = backend.start_masked(Job(TEXT[:8], 0, 4), backend.new_sequence())
    generation.end_masks(complete=True)
    list(generation)
    assert backend.drafting is not None and generation.masks_ahead == 7


def test_the_two_run_one_at_a_time(load: Load) -> None:
    backend, job = load("two workers"), Job(TEXT[:8], 0, CONTEXT - 8)
    running = backend.start(replace(job, prediction=TEXT[:4]), backend.new_sequence())
    with pytest.raises(BackendError, match="one job at a time"):
        backend.start(plain(job), backend.new_sequence())
    running.cancel()
    list(running)
    assert asked(backend, Job(TEXT[:8], 0, 4, drafts=False)).finish_reason == "length"


def test_until_it_is_compiled_requests_take_the_other(load: Load) -> None:
    backend = load("two workers", NeverCompiled)
    assert asked(backend, Job(TEXT[:8], 0, 4, prediction=TEXT[:4])).drafted == 0
    assert backend.drafting is None and backend.kernel.launches == 1


def test_one_that_does_not_compile_is_told_once(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    backend = load("two workers", Failed)
    for _ in range(2):
        asked(backend, Job(TEXT[:8], 0, 4))
    assert caplog.text.count("no kernel for drafts, so none are checked: ptxas: out of patience") == 1
    assert backend.kernel.launches == 2 and not backend.pending


def test_benchmarks_of_drafts_wait_for_the_kernel(load: Load) -> None:
    backend = load("two workers", Later)
    await_drafts(backend)
    assert backend.drafting is not None
    with pytest.raises(UsageError, match="no kernel for drafts"):
        await_drafts(load("two workers", Failed))


@pytest.mark.parametrize(
    "fault",
    [ResourceError("The GPU is out of memory."), BackendError("The driver says no."), MemoryError("no room")],
)
def test_one_that_cannot_be_loaded_fails_no_request(
    load: Load, fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that was free at the start may be taken by now."""
    backend, job = load("two workers"), Job(TEXT[:8], 0, 4)
    expected = asked(backend, plain(job))
    tried = []

    def fails(*arguments: object, **options: object) -> None:
        tried.append(options)
        raise fault

    monkeypatch.setattr(drafting, "CudaBackend", fails)
    for _ in range(2):
        assert asked(backend, job).told == expected.told
    generation = backend.start_masked(job, backend.new_sequence())
    generation.end_masks(complete=True)
    assert list(generation) == [] and generation.finish_reason == "stop"
    assert len(tried) == 1 and caplog.text.count("cannot be loaded") == 1


def test_short_of_memory_there_is_one_kernel(
    place: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load("two workers")
    checkpoint, plan = open_checkpoint(place / SETUPS["two workers"][0]), backend._coming[0]
    enough = memory_plan(backend.gpu_plan).total
    monkeypatch.setattr(drafting, "memory_free_and_total", lambda: (enough, enough))
    alone = DraftingBackend.load_both(backend.spec, backend.gpu_plan, plan, checkpoint)
    assert type(alone) is CudaBackend
    alone.close()
