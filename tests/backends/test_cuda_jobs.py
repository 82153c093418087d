"""Jobs of the CUDA backend on a fake GPU, whose kernel is a thread: tokens, cancelling, faults, and what is left."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cpu_cases import take_until_cancelled
from backends.fake_cuda import FakeCuda, Stream, fake_gpu
from families import Case, make_checkpoint
from monotape.backends.cuda import backend as module
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.loading import LoadedModel
from monotape.backends.cuda.params import ParamsStruct, StatusStruct
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.cuda.trace import FIELDS
from monotape.backends.protocol import Job, Sampling
from monotape.compiler.gpu import gpu_plan
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import (
    BackendError,
    CheckpointError,
    DeadlineFault,
    NumericalFault,
    RequestError,
    ResourceError,
    UnsupportedModel,
)
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint
from monotape.weights.tapes import Progress
from waiting import PATIENCE_S, until

CONTEXT, WORKERS = 2500, 5
CASE = Case("job", "llama", {"head_dim": 16, "max_position_embeddings": 4000})
START_NS = 10**15
_STOP, _LENGTH, _CANCELLED, _NUMERICAL, _DEADLINE = range(1, 6)


def integers(address: int, count: int, kind: Any = ctypes.c_int32) -> Any:
    return (kind * count).from_address(address)


class ThreadKernel:
    """Takes a kernel's place: token i is i plus the last id of the prompt, and every one takes a moment."""

    made: list[ThreadKernel]

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, told: str) -> None:
        self.cubin, self.stream, self.launches = cubin, Stream(), 0
        self.fault: tuple[int, int, int, int] | None = None  # finish, worker, stage, layer of the next launch
        self.pause_s, self.filled = 0.0002, 0
        self._thread = threading.Thread()
        self.params = ParamsStruct()
        self.made.append(self)

    def launch(self, blocks: int, threads: int, params: ParamsStruct) -> None:
        assert not self.running, "two kernels at once"
        self.params = ParamsStruct.from_buffer_copy(params)
        self.launches += 1
        self.stream.sync()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        p = self.params
        status = StatusStruct.from_address(p.status)
        status.start_ns = START_NS
        stops = set(integers(p.stop_ids, p.stop_count)) if p.stop_count else set()
        last = integers(p.prompt, p.prompt_length)[-1]
        finish = _LENGTH
        status.filled = self.filled
        if p.trace:
            clocks = integers(p.trace, WORKERS * p.trace_tokens * 26 * len(FIELDS), ctypes.c_int64)
            clocks[:] = [START_NS + number for number in range(len(clocks))]
        if p.logits_out:
            rows = integers(p.logits_out, (p.prompt_length - p.cached) * 131, ctypes.c_float)
            rows[:] = [float(number) for number in range(len(rows))]
        for number in range(0 if p.logits_out else p.max_tokens):
            time.sleep(self.pause_s)
            if status.cancel:
                finish = _CANCELLED
                break
            if self.fault is not None and number == 3:
                finish, status.worker, status.stage, status.layer = self.fault
                self.fault = None
                break
            integers(p.ids, p.max_tokens)[number] = last + number
            integers(p.times_ns, p.max_tokens, ctypes.c_int64)[number] = START_NS + 1000 * (number + 1)
            if p.sampling.logprobs:
                integers(p.sampling.logprobs, p.max_tokens, ctypes.c_float)[number] = -0.5 * number
                pair = slice(2 * number, 2 * number + 2)
                integers(p.sampling.top_ids, p.max_tokens * 2)[pair] = [number, 130]
                integers(p.sampling.top_values, p.max_tokens * 2, ctypes.c_float)[pair] = [-1, -2]
            status.tokens = number + 1
            if last + number in stops:
                finish = _STOP
                break
        status.finish = finish
        time.sleep(0.002)  # a kernel ends a little after it has said so

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def finished(self) -> bool:
        return not self.running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CASE, tmp_path_factory.mktemp("job"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    ThreadKernel.made = []
    monkeypatch.setattr(module, "Kernel", ThreadKernel)
    monkeypatch.setattr(module, "compile_kernel", lambda header: header.encode())
    with fake_gpu(FakeCuda()) as fake:
        yield fake


def load(folder: Path, progress: Progress | None = None) -> CudaBackend:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    return CudaBackend.load(spec, gpu_plan(spec, WORKERS, CONTEXT), checkpoint, progress)


@pytest.fixture
def backend(gpu: FakeCuda, folder: Path) -> Iterator[CudaBackend]:
    backend = load(folder)
    yield backend
    backend.close()
    assert not ThreadKernel.made[0].running


def sequence_of(backend: CudaBackend, length: int = 0) -> CudaSequence:
    sequence = backend.new_sequence()
    sequence.length = length
    return sequence


def ids(tokens: Any) -> list[int]:
    return [token.id for token in tokens]


def works(backend: CudaBackend) -> bool:
    return ids(backend.start(Job((9, 40), 0, 4), backend.new_sequence())) == [40, 41, 42, 43]


def test_tokens_come_with_their_times_and_the_sequence_grows(backend: CudaBackend) -> None:
    sequence = backend.new_sequence()
    generation = backend.start(Job((3, 4, 50), 0, 30), sequence)
    tokens = list(generation)
    assert ids(tokens) == list(range(50, 80))
    assert [token.time_ns - generation.start_ns for token in tokens[:2]] == [1000, 2000]
    assert (generation.finish_reason, sequence.length) == ("length", 3 + 30 - 1)
    assert generation.launch_ns > 0
    assert ids(generation) == ids(tokens)  # once more
    assert backend.kernel.launches == 1


def test_a_stop_id_ends_it_and_many_of_them_find_room(backend: CudaBackend) -> None:
    stops = tuple(range(100, CONTEXT + 300))
    generation = backend.start(Job((7, 98), 0, 30, stops), backend.new_sequence())
    assert ids(generation) == [98, 99, 100]
    assert generation.finish_reason == "stop"
    assert works(backend)


def test_only_new_ids_of_a_prompt_are_brought(backend: CudaBackend) -> None:
    sequence = backend.new_sequence()
    list(backend.start(Job((5, 6, 7), 0, 4), sequence))
    list(backend.start(Job((1, 2, 3, 4, 60), 3, 2, (8, 9)), sequence))
    params = ThreadKernel.made[0].params
    assert list(integers(params.prompt, 5)) == [5, 6, 7, 4, 60]
    assert list(integers(params.stop_ids, 2)) == [8, 9]
    assert (params.prompt_length, params.cached, params.max_tokens) == (5, 3, 2)


def test_requests_take_no_new_memory(backend: CudaBackend, gpu: FakeCuda) -> None:
    sequence = backend.new_sequence()
    list(backend.start(Job((5, 6), 0, 4), sequence))
    before, kept = gpu.used, set(gpu.kept)
    for number in range(5):
        list(backend.start(Job((5, 6, 7, 8), number % 3, 4, (1,)), sequence))
        backend.logits([3] * 11, sequence)
        sequence.truncate(3)
    assert (gpu.used, set(gpu.kept)) == (before, kept)


def test_sampling_reaches_the_kernel_and_log_probabilities_come_back(backend: CudaBackend) -> None:
    words = backend._memories["sampler_words"]
    words.fill(0)
    sequence = backend.new_sequence()
    list(backend.start(Job((5, 6, 7), 0, 4), sequence))
    assert not words.read(np.empty(words.bytes, np.uint8)).any()  # greedy: nothing of it is touched
    assert not any(bytes(ThreadKernel.made[0].params.sampling))
    bias = ((9, 1.5), (4, 2.5))
    sampling = Sampling(temperature=0.75, presence_penalty=0.5, logit_bias=bias, seed=2**63 + 5)
    tokens = list(backend.start(Job((1, 2, 3, 60), 3, 3, (8,), 2, sampling, logprobs=2), sequence))
    assert [(token.logprob, token.top_logprobs) for token in tokens] == [
        (-0.5 * number, ((number, -1.0), (130, -2.0))) for number in range(3)
    ]
    assert (words.read(np.empty(words.bytes, np.uint8)) == 0xFF).all()
    params = ThreadKernel.made[0].params
    assert list(integers(params.prompt, 4)) == [1, 2, 3, 60]  # penalties look at all of it
    told = params.sampling
    assert (told.active, told.temperature, told.seed, told.min_tokens) == (1, 0.75, 2**63 + 5, 2)
    assert told.adjusted and told.counts and told.bias_count == 2
    assert works(backend)


@pytest.mark.parametrize("after", [0, 1, 30])
def test_cancel_ends_it_and_the_backend_goes_on(backend: CudaBackend, after: int) -> None:
    sequence = sequence_of(backend)
    generation = backend.start(Job((3, 4, 50), 0, 2000), sequence)
    seen = take_until_cancelled(generation, after)
    assert generation.finish_reason == "cancelled"
    assert after <= seen < 2000
    assert sequence.length == (3 + seen - 1 if seen else 0)
    assert works(backend)


def test_cancelled_before_its_first_token_it_keeps_what_was_cached(backend: CudaBackend) -> None:
    backend.kernel.pause_s = 0.05  # type: ignore[attr-defined]
    sequence = backend.new_sequence()
    list(backend.start(Job((3, 4, 5, 6), 0, 1), sequence))
    generation = backend.start(Job((3, 4, 7), 2, 9), sequence)
    generation.cancel()
    assert list(generation) == []
    assert (generation.finish_reason, sequence.length) == ("cancelled", 2)
    assert generation.filled == 2


def test_cancelled_half_way_through_a_prompt_it_keeps_the_chunks_that_are_complete(
    backend: CudaBackend,
) -> None:
    kernel: Any = backend.kernel
    kernel.pause_s, kernel.filled = 0.05, 3
    sequence = backend.new_sequence()
    generation = backend.start(Job((3, 4, 5, 6, 7), 0, 9), sequence)
    generation.cancel()
    assert list(generation) == []
    assert (generation.finish_reason, generation.filled, sequence.length) == ("cancelled", 3, 3)


def test_a_late_cancel_does_not_hit_the_next_request(backend: CudaBackend) -> None:
    first = backend.start(Job((3, 4), 0, 5), backend.new_sequence())
    list(first)
    second = backend.start(Job((3, 4), 0, 50), backend.new_sequence())
    first.cancel()
    assert len(list(second)) == 50


def test_one_job_at_a_time(backend: CudaBackend) -> None:
    running = backend.start(Job((3, 4), 0, 2000), backend.new_sequence())
    sequence = sequence_of(backend)
    for call in (
        lambda: backend.start(Job((3, 4), 0, 1), sequence),
        lambda: backend.logits([1], sequence),
        lambda: backend.trace([1, 2], 3),
    ):
        with pytest.raises(BackendError, match="one job at a time"):
            call()
    running.cancel()
    assert len(list(running)) < 2000
    assert works(backend)


def test_a_job_that_ended_unread_keeps_its_tokens(backend: CudaBackend) -> None:
    sequence = backend.new_sequence()
    unread = backend.start(Job((3, 70), 0, 5), sequence)
    while backend.kernel.finished() is False:
        time.sleep(0.001)
    assert works(backend)
    assert ids(unread) == [70, 71, 72, 73, 74]
    assert (unread.finish_reason, sequence.length) == ("length", 2 + 5 - 1)


def _read_one(backend: CudaBackend) -> None:
    for _ in backend.start(Job((3, 4), 0, 2000), backend.new_sequence()):
        break


def _read_nothing(backend: CudaBackend) -> None:
    backend.start(Job((3, 4), 0, 2000), backend.new_sequence())


def _fail(backend: CudaBackend) -> None:
    def read() -> None:
        for token in backend.start(Job((3, 4), 0, 2000), backend.new_sequence()):
            raise ValueError(f"not {token.id}")

    with pytest.raises(ValueError, match="not 4"):
        read()


def _in_a_cycle(backend: CudaBackend) -> None:
    generation: Any = backend.start(Job((3, 4), 0, 2000), backend.new_sequence())
    generation.itself = generation
    del generation
    gc.collect()


@pytest.mark.parametrize("leave", [_read_one, _read_nothing, _fail, _in_a_cycle])
def test_who_leaves_half_way_leaves_no_kernel_running(
    backend: CudaBackend, leave: Callable[[CudaBackend], None]
) -> None:
    leave(backend)
    assert not backend.kernel.running  # type: ignore[attr-defined]
    assert works(backend)


def test_an_interrupted_wait_ends_the_kernel(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    from monotape.backends.cuda import generation as generation_module

    calls: list[float] = []

    def sleep(seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == 3:
            raise KeyboardInterrupt
        time.sleep(seconds)

    generation = backend.start(Job((3, 4), 0, 2000), backend.new_sequence())
    monkeypatch.setattr(
        generation_module, "time", type("", (), {"sleep": sleep, "perf_counter_ns": lambda: 0})
    )
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert not backend.kernel.running  # type: ignore[attr-defined]
    assert generation.finish_reason == "cancelled"
    assert works(backend)


def test_an_interrupt_between_the_launch_and_its_owner_ends_the_kernel(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = backend.kernel
    launch = kernel.launch

    def interrupted(*arguments: Any) -> None:
        launch(*arguments)
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:  # it holds all frames, as an interactive shell does
            backend.start(Job((3, 4), 0, 2000), backend.new_sequence())
    running = kernel.running
    StatusStruct.from_address(kernel.params.status).cancel = 1  # no test after this one has such a thread
    kernel._thread.join()
    assert not running
    assert works(backend)
    assert signal.getsignal(signal.SIGINT) is handler
    del caught


def test_a_nan_is_a_fault_that_says_where_and_the_sequence_is_empty(backend: CudaBackend) -> None:
    sequence = backend.new_sequence()
    list(backend.start(Job((3, 4, 5), 0, 1), sequence))
    backend.kernel.fault = (_NUMERICAL, 4, backend.gpu_rank.stage_names.index("down"), 2)  # type: ignore[attr-defined]
    with pytest.raises(NumericalFault, match=r"Stage down of layer 2 .*worker 4"):
        list(backend.start(Job((3, 4, 5, 6), 2, 9), sequence))
    assert (sequence.length, sequence.bytes) == (0, 0)
    backend.kernel.fault = (_NUMERICAL, -1, 0, 0)  # type: ignore[attr-defined]
    with pytest.raises(NumericalFault, match="The logits are not numbers"):
        list(backend.start(Job((3, 4, 5, 6), 0, 9), sequence))
    assert works(backend)


def test_a_deadline_names_who_was_furthest_behind(backend: CudaBackend, gpu: FakeCuda) -> None:
    backend.kernel.fault = (_DEADLINE, 0, 0, 0)  # type: ignore[attr-defined]
    generation = backend.start(Job((3, 4), 0, 9), backend.new_sequence())
    exchange = backend._memories["exchange"]
    waits = np.ctypeslib.as_array(integers(exchange.pointer, exchange.bytes // 4))[-4 * WORKERS :].reshape(
        -1, 4
    )
    waits[3] = 7, 1, backend.gpu_rank.stage_names.index("down"), 12
    waits[1] = 7, 1, backend.gpu_rank.stage_names.index("attention"), 5
    with pytest.raises(
        DeadlineFault, match=r"Worker 1 .* word 5 of .* stage attention in layer 1, at position 7"
    ):
        list(generation)
    assert works(backend)


def test_a_driver_that_fails_ends_the_job_with_its_error(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:
        raise BackendError("The CUDA driver says CUDA_ERROR_ILLEGAL_ADDRESS.")

    generation = backend.start(Job((3, 4), 0, 9), backend.new_sequence())
    with monkeypatch.context() as patch:
        patch.setattr(backend.kernel, "finished", broken)
        with pytest.raises(BackendError, match="ILLEGAL_ADDRESS"):
            list(generation)
    with pytest.raises(BackendError, match="ILLEGAL_ADDRESS"):
        list(generation)
    assert generation.finish_reason is None
    ThreadKernel.made[0]._thread.join()


def test_a_backend_whose_driver_has_failed_gives_everything_back(
    gpu: FakeCuda, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:
        ThreadKernel.made[0]._thread.join()
        raise BackendError("The CUDA driver says CUDA_ERROR_ILLEGAL_ADDRESS.")

    backend = load(folder)
    llm = LLM.from_parts(backend, context=CONTEXT)
    monkeypatch.setattr(backend.kernel, "finished", broken)
    gpu.fault = "CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel, ..."
    with pytest.raises(BackendError, match="ILLEGAL_ADDRESS"), llm:
        llm.generate([[3, 4]], SamplingParams(max_tokens=9))
    assert gpu.used == 0


def test_logits_of_every_row(backend: CudaBackend) -> None:
    sequence = backend.new_sequence()
    for count in (3, 40):  # the second takes more memory than is kept for it
        got = backend.logits([5] * count, sequence)
        assert got.tolist() == np.arange(131 * count, dtype=np.float32).reshape(count, 131).tolist()
    assert sequence.length == 43
    assert ThreadKernel.made[0].params.chunk > 0
    backend.logits([5], sequence, chunk=0)
    assert ThreadKernel.made[0].params.chunk == 0


def test_a_context_can_be_filled_to_its_last_position(backend: CudaBackend) -> None:
    backend.kernel.pause_s = 0.0  # type: ignore[attr-defined]
    sequence = backend.new_sequence()
    assert len(list(backend.start(Job((3,) * 100, 0, CONTEXT - 100), sequence))) == CONTEXT - 100
    assert sequence.length == CONTEXT - 1


def test_a_trace_has_the_wanted_tokens_by_another_kernel(backend: CudaBackend) -> None:
    trace = backend.trace([3, 4, 5], 2)
    assert set(trace.records["token"].tolist()) == {0, 1}
    assert set(trace.records["worker"].tolist()) == set(range(WORKERS))
    assert trace.stages == backend.gpu_rank.stage_names[:8]
    first = trace.records[(trace.records["token"] == 0) & (trace.records["worker"] == 0)]
    assert first["start_ns"].min() == START_NS + 26 * len(FIELDS)  # the prefill's token is not in it
    assert trace.stage_bytes["attention"] == backend.plan.ranks[0].kv.position_bytes * (3 + 1)
    plain, traced = ThreadKernel.made
    assert b"kTrace = true" in traced.cubin and b"kTrace = false" in plain.cubin
    assert (plain.launches, traced.launches) == (0, 1)
    assert works(backend) and not plain.params.trace
    with pytest.raises(RequestError, match="2499 tokens after 3 does not fit 2500"):
        backend.trace([3, 4, 5], 2499)


def test_closing_ends_what_runs_and_gives_everything_back(gpu: FakeCuda, folder: Path) -> None:
    backend = load(folder)
    sequence = backend.new_sequence()
    generation = backend.start(Job((3, 4), 0, 2000), sequence)
    backend.close()
    assert not ThreadKernel.made[0].running
    assert generation.finish_reason == "cancelled"
    del sequence, generation
    gc.collect()
    assert gpu.used == 0


def test_what_cannot_be_loaded_is_refused_before_anything_is_taken(
    gpu: FakeCuda, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModel, match="heads of 20 values"):
        load(make_checkpoint(Case("heads", "llama", {"head_dim": 20}), tmp_path))
    gpu.memory = 1 << 20
    with pytest.raises(ResourceError, match="but the model needs"):
        load(folder)
    assert (gpu.used, ThreadKernel.made) == (0, [])
    gpu.memory = 1 << 30

    def broken(header: str) -> bytes:
        raise BackendError("The kernel does not compile.")

    monkeypatch.setattr(module, "compile_kernel", broken)
    with pytest.raises(BackendError, match="does not compile"):
        load(folder)
    assert gpu.used == 0


def test_a_kernel_that_does_not_compile_ends_the_loading_of_the_weights(
    gpu: FakeCuda, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    told: list[tuple[str, int, int]] = []
    load_weights = module.load_model

    def broken(header: str) -> bytes:
        assert begun.wait(PATIENCE_S)
        raise BackendError("The kernel does not compile.")

    def load_slowly(*arguments: Any) -> LoadedModel:
        *before, report, shared = arguments

        def tell(what: str, done: int, total: int) -> None:
            report(what, done, total)
            begun.set()
            until(lambda: report(what, done, total), "the error of the compiler")

        return load_weights(*before, tell, shared)

    monkeypatch.setattr(module, "compile_kernel", broken)
    monkeypatch.setattr(module, "load_model", load_slowly)
    with pytest.raises(BackendError, match="does not compile"):
        load(folder, lambda *progress: told.append(progress))
    assert {done for _, done, _ in told} == {1}
    assert gpu.used == 0


def test_broken_weights_do_not_wait_for_the_compiler(
    gpu: FakeCuda, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def slow(header: str) -> bytes:
        assert released.wait(PATIENCE_S)
        return b""

    def broken(*_: object) -> None:
        raise CheckpointError("The file is damaged.")

    monkeypatch.setattr(module, "compile_kernel", slow)
    monkeypatch.setattr(module, "load_model", broken)
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)
    released.set()
