"""The CUDA backend: one cooperative launch runs a whole request on every multiprocessor of a Hopper GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory, Kernel, PinnedMemory, compile_kernel
from monotape.backends.cuda.header import SHARED_MEMORY, plan_header
from monotape.backends.cuda.packer import BlockPacker, to_bf16
from monotape.backends.protocol import FinishReason, Job, KvSequence, Sampling, Token
from monotape.errors import BackendError, DeadlineFault, NumericalFault, RequestError
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan
from monotape.weights.check import read_role
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.small import small_tensors
from monotape.weights.tapes import Progress, load_tapes

THREADS = 9 * 32
DEADLINE_NS = 2_000_000_000
STAGES = ("qkv", "output", "gate_up", "down", "head", "attention", "combine", "sample")
_FINISH: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "cancelled"}
_POLL_S = 20e-6


class ParamsStruct(ctypes.Structure):
    """kernels/types.h: Params"""

    _fields_ = (
        *((name, c_void_p) for name in ("tapes", "tape_start", "layer_bytes", "spans", "attention_norm", "ffn_norm")),
        *((name, c_void_p) for name in ("final_norm", "qkv_bias", "q_norm", "k_norm", "cosines", "sines", "windows")),
        *((name, c_void_p) for name in ("embedding", "keys", "values", "exchange", "logits", "logits_out", "status")),
        *((name, c_void_p) for name in ("prompt", "stop_ids", "ids", "times_ns", "trace")),
        ("kv_capacity", c_int64), ("deadline_ns", c_int64),
        *((name, c_int32) for name in ("prompt_length", "cached", "max_tokens", "stop_count")),
    )  # fmt: skip


class CudaSequence:
    """KV of one conversation on the GPU."""

    def __init__(self, plan: Plan, context: int) -> None:
        kv = plan.ranks[0].kv
        self.length, self.capacity = 0, context
        half = kv.position_bytes // 2 * context
        self.keys, self.values = DeviceMemory(half), DeviceMemory(half)

    @property
    def bytes(self) -> int:
        return self.keys.bytes + self.values.bytes

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length


class CudaBackend:
    """A model on one GPU."""

    name = "cuda"

    def __init__(self, spec: ModelSpec, plan: Plan, params: ParamsStruct, kept: list[Any]) -> None:
        self.spec, self.plan = spec, plan
        self._params, self._kept = params, kept
        self.kernel = Kernel(compile_kernel(plan_header(spec, plan)), "monotape_request", SHARED_MEMORY)
        self._exchange = DeviceMemory(exchange_bytes(spec, plan))
        self._logits = DeviceMemory(4 * (spec.vocab + 8))
        params.exchange, params.logits = self._exchange.pointer, self._logits.pointer
        params.deadline_ns = DEADLINE_NS

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> CudaBackend:
        params, kept = ParamsStruct(), []

        def put(name: str, array: NDArray[Any]) -> None:
            kept.append(DeviceMemory.of(np.ascontiguousarray(array)))
            setattr(params, name, kept[-1].pointer)

        rank = plan.ranks[0]
        tapes = load_tapes(spec, plan, checkpoint, BlockPacker(), progress)
        starts = np.cumsum([0, *(tape.bytes for tape in rank.tapes)])
        memory = DeviceMemory(int(starts[-1]))
        for tape, start in zip(tapes, starts[:-1], strict=True):
            memory.write(tape, int(start))
        kept.append(memory)
        params.tapes = memory.pointer
        put("tape_start", starts[:-1].astype(np.int64))
        put("layer_bytes", np.array([tape.layer_bytes for tape in rank.tapes], np.int64))
        put("spans", span_table(plan))
        for name, array in small_tensors(spec, checkpoint).items():
            put(name, array)
        cosines, sines = position_tables(spec.rope, plan.context)
        put("cosines", cosines)
        put("sines", sines)
        put("windows", np.array([window or 0 for window in spec.windows], np.int32))
        if not spec.tied:
            put("embedding", to_bf16(read_role(spec, checkpoint, "embedding", None, 0, spec.vocab)))
        return cls(spec, plan, params, kept)

    def new_sequence(self) -> CudaSequence:
        return CudaSequence(self.plan, self.plan.context)

    def start(self, job: Job, sequence: KvSequence) -> CudaGeneration:
        plain = dataclasses.replace(job.sampling, seed=0) == Sampling()
        if not plain or job.logprobs is not None or job.min_tokens:
            raise RequestError(
                "The CUDA backend only decodes greedily yet, without penalties, bias or log-probabilities.",
                "Set temperature to 0 or use --backend cpu.",
            )
        assert isinstance(sequence, CudaSequence)
        sequence.truncate(job.cached)
        return CudaGeneration(self, job, sequence)

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        assert isinstance(sequence, CudaSequence)
        prompt = (*([0] * sequence.length), *tokens)
        out = DeviceMemory(4 * len(tokens) * self.spec.vocab)
        generation = CudaGeneration(self, Job(prompt, sequence.length, 1), sequence, out.pointer)
        for _ in generation:
            pass
        sequence.length = len(prompt)
        return out.read(np.empty((len(tokens), self.spec.vocab), np.float32))

    def launch(self, params: ParamsStruct) -> None:
        self._exchange.fill(0xFF, self.kernel.stream)
        self.kernel.launch(self.plan.machine.workers, THREADS, params)

    def lose_word_of(self, stage: str) -> None:
        """For tests of the deadline: takes its tiles of a stage away from one worker, whose words then never come."""
        spans = span_table(self.plan)
        index = [stage.name for stage in self.plan.ranks[0].stages].index(stage)
        spans[int(np.flatnonzero(spans["count"][:, index])[0]), index]["count"] = 0
        self._kept.append(DeviceMemory.of(spans))
        self._params.spans = self._kept[-1].pointer

    def close(self) -> None:
        self._kept.clear()


class CudaGeneration:
    """A running launch; iterating reads what it wrote into pinned memory."""

    def __init__(self, backend: CudaBackend, job: Job, sequence: CudaSequence, logits_out: int = 0) -> None:
        self.finish_reason: FinishReason | None = None
        self._backend, self._job, self._sequence = backend, job, sequence
        self._ids, self._times = PinnedMemory(4 * job.max_tokens), PinnedMemory(8 * job.max_tokens)
        self._status = PinnedMemory(64)
        self._prompt = DeviceMemory.of(np.array(job.prompt, np.int32))
        self._stops = DeviceMemory.of(np.array([*job.stop_ids, -1], np.int32))
        params = ParamsStruct.from_buffer_copy(backend._params)
        params.keys, params.values = sequence.keys.pointer, sequence.values.pointer
        params.kv_capacity = sequence.capacity
        params.prompt, params.stop_ids = self._prompt.pointer, self._stops.pointer
        params.ids, params.times_ns = self._ids.pointer, self._times.pointer
        params.status, params.logits_out = self._status.pointer, logits_out
        params.prompt_length, params.cached = len(job.prompt), job.cached
        params.max_tokens, params.stop_count = job.max_tokens, len(job.stop_ids)
        self._params = params
        backend.launch(params)
        self.start_ns = time.time_ns()

    @property
    def _words(self) -> NDArray[np.int32]:
        words: NDArray[np.int32] = self._status.view.view(np.int32)
        return words

    def __iter__(self) -> Iterator[Token]:
        seen, ids, times = 0, self._ids.view.view(np.int32), self._times.view.view(np.int64)
        while True:
            ended = self._backend.kernel.finished()
            while seen < int(self._words[1]):
                yield Token(int(ids[seen]), int(times[seen]))
                seen += 1
            if ended:
                return self._finished(seen)
            time.sleep(_POLL_S)

    def cancel(self) -> None:
        self._words[6] = 1

    def _finished(self, tokens: int) -> None:
        finish, _, worker, stage, word, layer = (int(value) for value in self._words[:6])
        if finish == 4:
            raise NumericalFault("The logits are not numbers.", "Try --backend cpu --dtype f32.")
        if finish == 5:
            raise DeadlineFault(
                f"Worker {worker} waited too long for word {word} of stage {STAGES[stage]} in layer {layer}.",
                "This is a fault in Monotape; please report it.",
            )
        if finish not in _FINISH:
            raise BackendError(f"The kernel ended in state {finish}.", "This is a fault in Monotape.")
        self._sequence.length = len(self._job.prompt) + tokens - 1 if tokens else self._job.cached
        self.finish_reason = _FINISH[finish]


def exchange_bytes(spec: ModelSpec, plan: Plan) -> int:
    """kernels/types.h: sizeof(Exchange)"""
    workers = plan.machine.workers
    splits = max(1, min(16, workers // spec.kv_heads))
    width, ffn = -(-spec.width // 8), -(-spec.ffn // 8)
    words = 3 * width + (spec.q_rows + 2 * spec.kv_rows) // 8 + spec.heads * splits * (spec.head_dim // 4 + 1)
    return 2 * 16 * (words + spec.q_rows // 8 + ffn) + 3 * 16 * workers


def span_table(plan: Plan) -> NDArray[Any]:
    """kernels/types.h: Span, [workers][stages]"""
    rank = plan.ranks[0]
    table = np.zeros(
        (plan.machine.workers, len(rank.stages)), [("first", "i4"), ("count", "i4"), ("offset", "i8")]
    )
    for tape in rank.tapes:
        segments = (*tape.layer_segments, tape.head_segment)
        for index, (stage, segment) in enumerate(zip(rank.stages, segments, strict=True)):
            span = stage.spans[tape.worker]
            table[tape.worker, index] = (span.first, span.count, segment.offset)
    return table
