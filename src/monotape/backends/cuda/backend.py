"""The CUDA backend: one cooperative launch runs a whole request on every multiprocessor of a Hopper GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda import rows
from monotape.backends.cuda.driver import DeviceMemory, Kernel, compile_kernel, device, memory_free_and_total
from monotape.backends.cuda.generation import CudaGeneration, Launch
from monotape.backends.cuda.header import SHARED_MEMORY, plan_header
from monotape.backends.cuda.loading import LoadedModel, load_model
from monotape.backends.cuda.memory import memory_plan, require_memory
from monotape.backends.cuda.params import (
    STAGE_ORDER,
    STAGES,
    THREADS,
    TRACED_STAGES,
    ParamsStruct,
    exchange_bytes,
    place_table,
    span_table,
)
from monotape.backends.cuda.request import RequestMemory
from monotape.backends.cuda.sampling import SamplingMemory, has_penalties, is_plain
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.cuda.trace import TraceRecords, records_of, stage_bytes_of
from monotape.backends.protocol import Job, KvSequence
from monotape.errors import BackendError, RequestError
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress

DEADLINE_NS = 2_000_000_000
KERNEL_NAME = "monotape_request"
_KEPT_LOGITS = 16  # rows; more of them are asked for by tests and scores, a few by every constrained token


class CudaBackend:
    """A model on one GPU."""

    name = "cuda"

    def __init__(self, spec: ModelSpec, plan: Plan, model: LoadedModel, cubin: bytes) -> None:
        self.spec, self.plan = spec, plan
        self.kernel = Kernel(cubin, KERNEL_NAME, SHARED_MEMORY)
        self.request_memory = RequestMemory(plan.context)
        self._trace_kernel: Kernel | None = None
        self._launch: Launch | None = None
        self._lock = threading.RLock()
        places, first_places = place_table(plan)
        self._memories = {
            **model.memories,
            "spans": DeviceMemory.of(span_table(plan)),
            "places": DeviceMemory.of(places),
            "exchange": DeviceMemory(exchange_bytes(spec, plan)),
            "logits": DeviceMemory(4 * (spec.vocab + 8)),
        }
        self._params = ParamsStruct()
        for name, memory in self._memories.items():
            setattr(self._params, name, memory.pointer)
        self._adjusted, self._counts = DeviceMemory(4 * spec.vocab), DeviceMemory(4 * spec.vocab)
        self._logits_out = DeviceMemory(4 * _KEPT_LOGITS * spec.vocab)
        self._params.chunk = rows.chunk_for(plan.context)
        self._params.rows, self._row_memories = rows.allocate(spec, self._params.chunk)
        self._params.first_place[:] = first_places
        self._params.deadline_ns = DEADLINE_NS
        windows = [window or 0 for window in spec.windows]
        self._params.widest_window = max(windows) if all(windows) else 0

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> CudaBackend:
        header = plan_header(spec, plan)  # a model that the kernel does not run is refused before all else
        working = exchange_bytes(spec, plan) + sum(rows.sizes(spec, rows.chunk_for(plan.context)).values())
        require_memory(memory_plan(spec, plan, plan.context, working), memory_free_and_total()[0])
        beside = ThreadPoolExecutor(1, "compile")
        try:
            cubin = beside.submit(compile_kernel, header)
            model = load_model(spec, plan, checkpoint, progress)
            try:
                return cls(spec, plan, model, cubin.result())
            except BaseException:
                for memory in model.memories.values():
                    memory.close()  # the exception's traceback would keep them
                raise
        finally:  # weights that cannot be loaded are no reason to wait for the compiler
            beside.shutdown(wait=False)

    def new_sequence(self) -> CudaSequence:
        return CudaSequence(self.spec, self.plan.context)

    def start(self, job: Job, sequence: KvSequence) -> CudaGeneration:
        assert isinstance(sequence, CudaSequence), "a sequence of another backend"
        return CudaGeneration(self, job, sequence)

    def begin(
        self, job: Job, sequence: CudaSequence, *, chunk: int | None = None, logits_out: int = 0,
        kernel: Kernel | None = None, trace: DeviceMemory | None = None,
    ) -> Launch:  # fmt: skip
        """Launches a job. `chunk` 0 takes the prompt along the path of decoding, one token at a time.

        All of it is queued on the kernel's stream, without waiting for anything.
        """
        if not is_plain(job):
            raise RequestError(
                "The CUDA backend only decodes greedily yet, without penalties, bias or log-probabilities.",
                "Set temperature to 0 or use --backend cpu.",
            )
        assert self._memories, "a closed backend"
        assert job.cached <= sequence.length and job.cached < len(job.prompt)
        with self._lock:
            self._require_idle()
            device()  # this may be another thread than the latest request's
            kernel = kernel or self.kernel
            sequence.truncate(job.cached)
            sequence.reserve(min(len(job.prompt) + job.max_tokens, self.plan.context), kernel.stream)
            sampling = SamplingMemory(job, self.spec.vocab, self._adjusted.pointer, self._counts.pointer)
            params = ParamsStruct.from_buffer_copy(self._params)
            params.kv, params.kv_units, params.logits_out = sequence.pointer, sequence.units, logits_out
            if chunk is not None:
                params.chunk = chunk
            if trace is not None:
                params.trace, params.trace_tokens = trace.pointer, job.max_tokens
            self.request_memory.begin(job, params, kernel.stream, whole_prompt=has_penalties(job))
            self._memories["exchange"].fill(0xFF, kernel.stream)
            launch = Launch(self, kernel, job, sequence, sampling)
            kernel.launch(self.plan.machine.workers, THREADS, params)
            self._launch = launch
            return launch

    def _require_idle(self) -> None:
        if self._launch is not None and not self._launch.collect():
            raise BackendError(
                "The CUDA backend runs one job at a time and is busy.",
                "Wait for the running generation, or cancel it.",
            )

    def logits(
        self, tokens: Sequence[int], sequence: KvSequence, chunk: int | None = None
    ) -> NDArray[np.float32]:
        """As the protocol has it; `chunk` as `begin` has it."""
        assert isinstance(sequence, CudaSequence), "a sequence of another backend"
        prompt = (*([0] * sequence.length), *tokens)  # cached ids are not read
        count = 4 * len(tokens) * self.spec.vocab
        out = self._logits_out if count <= self._logits_out.bytes else DeviceMemory(count)
        self.begin(Job(prompt, sequence.length, 1), sequence, chunk=chunk, logits_out=out.pointer).finish()
        sequence.length = len(prompt)
        return out.read(np.empty((len(tokens), self.spec.vocab), np.float32))

    def trace(self, prompt: Sequence[int], tokens: int) -> TraceRecords:
        """Decodes `tokens` tokens after a prompt, and keeps when each worker did what.

        By a kernel of its own, so that clocks cost nothing otherwise. The first token comes from the prefill: one
        more is generated, and that one left out.
        """
        count = tokens + 1
        if len(prompt) + count > self.plan.context:
            raise RequestError(
                f"A trace of {tokens} tokens after {len(prompt)} does not fit {self.plan.context} positions.",
                "Give a shorter prompt, or fewer tokens.",
            )
        if self._trace_kernel is None:
            header = plan_header(self.spec, self.plan, trace=True)
            self._trace_kernel = Kernel(compile_kernel(header), KERNEL_NAME, SHARED_MEMORY)
        slots = self.spec.layers * TRACED_STAGES + 2
        clocks = np.zeros((self.plan.machine.workers, count, slots, 3), np.int64)
        memory = DeviceMemory.of(clocks)
        job = Job(tuple(prompt), 0, count)
        self.begin(job, self.new_sequence(), kernel=self._trace_kernel, trace=memory).finish()
        read = stage_bytes_of(self.plan, len(prompt) + count // 2)
        return records_of(memory.read(clocks)[:, 1:], self.spec.layers, STAGES[:TRACED_STAGES], read)

    def blame(self) -> str:
        """After a deadline: what the worker that was furthest behind had waited for."""
        exchange = self._memories["exchange"].read(np.empty(self._memories["exchange"].bytes, np.uint8))
        waits = exchange[-16 * self.plan.machine.workers :].view(np.int32).reshape(-1, 4)
        waiting = [(int(position), int(layer), STAGE_ORDER[stage], stage, worker, int(word))
                   for worker, (position, layer, stage, word) in enumerate(waits) if stage >= 0]  # fmt: skip
        if not waiting:
            return "The kernel ran into its deadline, and no worker says what it waited for."
        position, layer, _, stage, worker, word = min(waiting)
        return (
            f"Worker {worker} waited too long for word {word} of the input of stage {STAGES[stage]} in layer {layer}, "
            f"at position {position}."
        )

    def lose_word_of(self, stage: str) -> None:
        """For tests of the deadline: takes its tiles of a stage away from one worker, whose words then never come."""
        spans = span_table(self.plan)
        index = [stage.name for stage in self.plan.ranks[0].stages].index(stage)
        spans[int(np.flatnonzero(spans["count"][:, index])[0]), index]["count"] = 0
        self._memories["spans"] = DeviceMemory.of(spans)
        self._params.spans = self._memories["spans"].pointer

    def close(self) -> None:
        """Ends what still runs, and gives all memory back."""
        with self._lock:
            if self._launch is not None:
                self._launch.abandon()
            own = (*self._row_memories, self._adjusted, self._counts, self._logits_out)
            for memory in (*self._memories.values(), *own):
                memory.close()
            self._memories.clear()
            self.request_memory.close()
