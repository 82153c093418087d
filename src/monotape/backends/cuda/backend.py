"""The CUDA backend: one cooperative launch runs a whole request on every multiprocessor of a Hopper GPU.

Of several ranks (see ranked.py) each is a backend of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda import rows
from monotape.backends.cuda.blame import Wait, sentence, waits_of
from monotape.backends.cuda.driver import (
    DeviceMemory,
    Kernel,
    compile_kernel,
    device,
    device_index,
    memory_free_and_total,
)
from monotape.backends.cuda.generation import CudaGeneration, MaskedCudaGeneration
from monotape.backends.cuda.header import Variant, plan_header
from monotape.backends.cuda.launch import Latest, Launch, require_idle
from monotape.backends.cuda.links import InboxMemory, Numbers, step_table
from monotape.backends.cuda.loading import LoadedModel, load_model
from monotape.backends.cuda.masks import MaskTable, MaskWriter, masks_for
from monotape.backends.cuda.memory import memory_plan, require_memory
from monotape.backends.cuda.params import (
    ParamsStruct,
    die_bytes,
    exchange_bytes,
    place_table,
    sampler_bytes,
    span_table,
)
from monotape.backends.cuda.rank_view import rank_plan
from monotape.backends.cuda.request import RequestMemory
from monotape.backends.cuda.sampling import SamplingMemory, has_penalties
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.cuda.trace import FIELDS, TraceRecords, records_of, stage_bytes_of
from monotape.backends.protocol import Job, KvSequence
from monotape.backends.token_ids import TokenIds
from monotape.errors import RequestError
from monotape.models.spec import ModelSpec
from monotape.plan.gpu import GpuPlan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress

DEADLINE_NS = 2_000_000_000
KERNEL_NAME, TOLD = "monotape_request", "request"
_KEPT_LOGITS = 16  # rows; more of them are asked for by tests and scores, a few by every constrained token


def _watching(cubin: Future[bytes], progress: Progress | None) -> Progress:
    """Progress that ends the loading with the compiler's error as soon as there is one: weights may take a minute."""

    def report(what: str, done: int, total: int) -> None:
        if cubin.done():
            cubin.result()
        if progress is not None:
            progress(what, done, total)

    return report


class CudaBackend:
    """A model on one GPU, or one rank of it."""

    name = "cuda"

    def __init__(
        self, spec: ModelSpec, gpu_plan: GpuPlan, model: LoadedModel, cubin: bytes, *, rank: int = 0,
        beside: CudaBackend | None = None,
    ) -> None:  # fmt: skip
        """`beside`: another kernel for the same model and KV, of which one runs at a time. This one uses its memory for
        what only lasts a request."""
        self.spec, self.gpu_plan, self.rank, self.device = spec, gpu_plan, rank, device_index()
        self.plan, self.gpu_rank = gpu_plan.plan, gpu_plan.ranks[rank]
        plan, own, workers = self.plan, self.gpu_rank, gpu_plan.workers
        self._own_plan, self.model = rank_plan(plan, rank), model
        self.kernel = Kernel(cubin, KERNEL_NAME, gpu_plan.machine.shared_memory, TOLD)
        self.request_memory = RequestMemory(plan.context)
        self.masks = MaskTable(spec.vocab, masks_for(own.rows_a_pass))
        self._trace_kernel: Kernel | None = None
        self._latest: Latest = beside._latest if beside else Latest()
        places, first_places = place_table(self._own_plan)
        self._memories = {
            **model.memories,
            "spans": DeviceMemory.of(span_table(self._own_plan)),
            "places": DeviceMemory.of(places),
            "exchange": DeviceMemory(
                exchange_bytes(own, workers) + die_bytes(gpu_plan.machine, own, workers)
            ),
            "logits": DeviceMemory(4 * ((own.rows_a_pass - 1) * own.row_logits + spec.vocab + 8)),
            "sampler_words": DeviceMemory(sampler_bytes(gpu_plan.machine, own, workers)),
        }
        self._params = ParamsStruct()
        for name, memory in self._memories.items():
            if name in own.vectors:
                self._params.vectors[own.vectors.index(name)] = memory.pointer
            else:
                setattr(self._params, name, memory.pointer)
        self._params.chunk = own.prefill.chunk
        self._row_memories: list[DeviceMemory] = []
        self._borrowed = list(model.memories.values()) if beside else []
        if beside is None:
            self._adjusted, self._counts = DeviceMemory(4 * spec.vocab), DeviceMemory(4 * spec.vocab)
            self._logits_out = DeviceMemory(4 * _KEPT_LOGITS * spec.vocab)
            self._params.rows, self._row_memories = rows.allocate(own.prefill)
        else:
            assert own.prefill == beside.gpu_rank.prefill and own.kv == beside.gpu_rank.kv
            self._adjusted, self._counts = beside._adjusted, beside._counts
            self._logits_out, self._params.rows = beside._logits_out, beside._params.rows
            self._borrowed += [self._adjusted, self._counts, self._logits_out]
        self._params.first_place[: len(first_places)] = first_places
        if own.rows_a_pass > 1:
            self._chains = DeviceMemory(own.chain_bytes * workers)
            self._params.chains = self._chains.pointer
            self._row_memories.append(self._chains)
        self._params.deadline_ns = DEADLINE_NS
        self.inbox: InboxMemory | None = None
        if plan.steps:
            self._open_inbox()

    def _open_inbox(self) -> None:
        self.inbox = InboxMemory(self.gpu_rank.links)
        self._numbers = Numbers()
        self._steps = DeviceMemory.of(step_table(self.plan))
        ranks = self._params.ranks
        ranks.rank, ranks.first_id = self.rank, self.gpu_rank.links.first_id
        ranks.peers = (1 << len(self.plan.ranks)) - 1 & ~(1 << self.rank)
        ranks.steps, ranks.own = self._steps.pointer, self.inbox.struct()

    def memories_of(self, names: Sequence[str]) -> dict[str, DeviceMemory]:
        return {name: self._memories[name] for name in names}

    def connect(self, inboxes: Sequence[InboxMemory]) -> None:
        """To the inboxes of all ranks, its own included."""
        for number, inbox in enumerate(inboxes):
            self._params.ranks.inbox[number] = inbox.struct(self.rank)

    def loop_back(self) -> None:
        """A rank alone: the words that it pushes to its peers come back to itself, as if each peer had sent them."""
        assert self.inbox is not None
        for number in range(len(self.plan.ranks)):
            self._params.ranks.inbox[number] = self.inbox.struct(number)

    def delay_links(self, nanoseconds: int) -> None:
        """For experiments, in a kernel built with `link_delay`: a word counts only this long after it was sent."""
        self._params.ranks.link_delay_ns = nanoseconds

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: GpuPlan, checkpoint: Checkpoint, progress: Progress | None = None, *,
        rank: int = 0, shared: Mapping[str, DeviceMemory] | None = None,
    ) -> CudaBackend:  # fmt: skip
        header = plan_header(plan, rank=rank)
        own_plan = rank_plan(plan.plan, rank)
        require_memory(memory_plan(plan, rank), memory_free_and_total()[0])
        beside = ThreadPoolExecutor(1, "compile")
        try:
            cubin = beside.submit(cls.compile, header)
            model = load_model(spec, own_plan, checkpoint, _watching(cubin, progress), shared)
            try:
                return cls(spec, plan, model, cubin.result(), rank=rank)
            except BaseException:
                for memory in model.memories.values():
                    memory.close()  # the exception's traceback would keep them
                raise
        finally:  # weights that cannot be loaded are no reason to wait for the compiler
            beside.shutdown(wait=False)

    @classmethod
    def compile(cls, header: str) -> bytes:
        """The machine code of the kernel for this plan.h."""
        return compile_kernel(header)

    def new_sequence(self) -> CudaSequence:
        return CudaSequence(self.gpu_rank.kv, self.plan.context, self.device)

    def start(self, job: Job, sequence: KvSequence) -> CudaGeneration:
        assert isinstance(sequence, CudaSequence), "a sequence of another backend"
        return CudaGeneration(self, job, sequence)

    def start_masked(self, job: Job, sequence: KvSequence) -> MaskedCudaGeneration:
        assert isinstance(sequence, CudaSequence), "a sequence of another backend"
        return MaskedCudaGeneration(self, replace(job, masked=True), sequence)

    def begin(
        self, job: Job, sequence: CudaSequence, *, chunk: int | None = None, logits_out: int = 0,
        kernel: Kernel | None = None, trace: DeviceMemory | None = None,
    ) -> Launch:  # fmt: skip
        """Launches a job. `chunk` 0 takes the prompt along the path of decoding, one token at a time."""
        launch, params = self.prepare(
            job, sequence, chunk=chunk, logits_out=logits_out, kernel=kernel, trace=trace
        )
        if self.inbox is not None:  # a rank alone
            self.number([params], self._numbers, [self.inbox])
        return self.launch(launch, params)

    def prepare(
        self, job: Job, sequence: CudaSequence, *, chunk: int | None = None, logits_out: int = 0,
        kernel: Kernel | None = None, trace: DeviceMemory | None = None, masks: MaskTable | None = None,
    ) -> tuple[Launch, ParamsStruct]:  # fmt: skip
        """All that comes before the launch is queued on the kernel's stream, without waiting for anything.

        `masks`: the table of another rank, which that rank's launch writes.
        """
        assert self._memories, "a closed backend"
        assert job.cached <= sequence.length and job.cached < len(job.prompt)
        with self._latest.lock:
            require_idle(self._latest.launch)
            device()  # this may be another thread than the latest request's
            kernel, own = kernel or self.kernel, self.gpu_rank
            sequence.truncate(job.cached)
            sequence.reserve(min(len(job.prompt) + job.max_tokens, self.plan.context), kernel.stream)
            sampling = SamplingMemory(job, self.spec.vocab, self._adjusted.pointer, self._counts.pointer)
            params = ParamsStruct.from_buffer_copy(self._params)
            params.sampling = sampling.struct
            if sampling.struct.active:
                self._memories["sampler_words"].fill(0xFF, kernel.stream)
            params.kv, params.kv_units, params.logits_out = sequence.pointer, sequence.units, logits_out
            if chunk is not None:
                assert 0 <= chunk <= params.chunk, "there is no memory for more rows"
                params.chunk = chunk
            if trace is not None:
                params.trace, params.trace_tokens = trace.pointer, job.max_tokens
            drafts = own.rows_a_pass > 1 and job.drafts and not logits_out
            self.request_memory.begin(
                job, params, kernel.stream, whole_prompt=has_penalties(job), drafts=drafts
            )
            self._memories["exchange"].fill(0xFF, kernel.stream)
            writer = MaskWriter(self.masks, len(job.prompt)) if job.masked and masks is None else None
            if job.masked:
                params.sampling.masks = (masks or self.masks).pointer
            return Launch(self, kernel, job, sequence, sampling, writer), params

    def launch(self, launch: Launch, params: ParamsStruct) -> Launch:
        with self._latest.lock:
            launch.kernel.launch(self.plan.machine.workers, self.gpu_plan.machine.threads, params)
            self._latest.launch = launch
            return launch

    def number(
        self, of_ranks: Sequence[ParamsStruct], numbers: Numbers, inboxes: Sequence[InboxMemory]
    ) -> None:
        """Gives every rank the same numbers, enough for the longest possible request."""
        if numbers.used_up:
            numbers.start_again(inboxes)
        taken = numbers.take(self.plan.context + 1, self.gpu_rank.links.sends, self.plan.modules)
        for params in of_ranks:
            assert params.ranks.inbox[0].sums, "a rank that nothing is connected with"
            params.ranks.first_send, params.ranks.first_token, params.ranks.first_meeting = taken

    def logits(
        self, tokens: Sequence[int], sequence: KvSequence, chunk: int | None = None
    ) -> NDArray[np.float32]:
        """As the protocol has it; `chunk` as `begin` has it."""
        assert isinstance(sequence, CudaSequence), "a sequence of another backend"
        prompt = TokenIds.joined(np.zeros(sequence.length, np.int32), tokens)  # cached ids are not read
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
            header = plan_header(self.gpu_plan, rank=self.rank, variant=Variant(trace=True))
            shared_memory = self.gpu_plan.machine.shared_memory
            self._trace_kernel = Kernel(self.compile(header), KERNEL_NAME, shared_memory, TOLD)
        traced = self.gpu_rank.stage_names[:-1]  # all but the rows of a prompt
        slots = self.spec.layers * len(traced) + 2
        clocks = np.zeros((self.plan.machine.workers, count, slots, len(FIELDS)), np.int64)
        memory = DeviceMemory.of(clocks)
        job = Job(tuple(prompt), 0, count, drafts=False)  # a token a pass
        self.begin(job, self.new_sequence(), kernel=self._trace_kernel, trace=memory).finish()
        read = stage_bytes_of(self._own_plan, len(prompt) + count // 2)
        return records_of(memory.read(clocks)[:, 1:], self.spec.layers, traced, read)

    def waits(self) -> list[Wait]:
        """After a deadline: what its workers had waited for."""
        exchange = self._memories["exchange"].read(np.empty(self._memories["exchange"].bytes, np.uint8))
        workers = self.plan.machine.workers
        end = exchange_bytes(self.gpu_rank, workers)
        table = exchange[end - 16 * workers : end].view(np.int32).reshape(-1, 4)
        return waits_of(self.gpu_rank, table)

    def blame(self) -> str:
        """After a deadline: what the worker that was furthest behind had waited for."""
        return sentence(self.waits(), len(self.plan.ranks))

    def lose_word_of(self, stage: str) -> None:
        """For tests of the deadline: takes its tiles of a stage away from one worker, whose words then never come."""
        spans = span_table(self._own_plan)
        index = [stage.name for stage in self._own_plan.ranks[0].stages].index(stage)
        spans[int(np.flatnonzero(spans["count"][:, index])[0]), index]["count"] = 0
        self._memories["spans"] = DeviceMemory.of(spans)
        self._params.spans = self._memories["spans"].pointer

    def close(self) -> None:
        """Ends what still runs, and gives all memory back."""
        with self._latest.lock:
            if self._latest.launch is not None:
                self._latest.launch.abandon()
            own = (*self._row_memories, self._adjusted, self._counts, self._logits_out)
            for memory in (*self._memories.values(), *own):
                if memory not in self._borrowed:
                    memory.close()
            self._memories.clear()
            self.request_memory.close()
            self.masks.close()
            if self.inbox is not None:
                self.inbox.close()
                self._steps.close()
