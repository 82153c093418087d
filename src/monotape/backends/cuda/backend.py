"""The CUDA backend: one cooperative launch runs a whole request on every multiprocessor of a Hopper GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory, Kernel, compile_kernel, memory_free_and_total
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.cuda.header import SHARED_MEMORY, plan_header
from monotape.backends.cuda.loading import LoadedModel, load_model
from monotape.backends.cuda.memory import memory_plan, require_memory
from monotape.backends.cuda.params import (
    STAGE_ORDER,
    STAGES,
    THREADS,
    ParamsStruct,
    exchange_bytes,
    place_table,
    span_table,
)
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.protocol import Job, KvSequence, Sampling
from monotape.errors import RequestError
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress

DEADLINE_NS = 2_000_000_000


class CudaBackend:
    """A model on one GPU."""

    name = "cuda"

    def __init__(self, spec: ModelSpec, plan: Plan, model: LoadedModel) -> None:
        self.spec, self.plan = spec, plan
        self.kernel = Kernel(compile_kernel(plan_header(spec, plan)), "monotape_request", SHARED_MEMORY)
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
        self._params.first_place[:] = first_places
        self._params.deadline_ns = DEADLINE_NS
        self._params.widest_window = 0 if None in spec.windows else max(window or 0 for window in spec.windows)

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> CudaBackend:
        require_memory(memory_plan(spec, plan, plan.context, exchange_bytes(spec, plan)), memory_free_and_total()[0])
        return cls(spec, plan, load_model(spec, plan, checkpoint, progress))

    def new_sequence(self) -> CudaSequence:
        return CudaSequence(self.spec, self.plan.context)

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

    def logits(
        self, tokens: Sequence[int], sequence: KvSequence, chunk: int | None = None
    ) -> NDArray[np.float32]:
        """As the protocol has it; `chunk` 0 takes the path of decoding, one token at a time."""
        assert isinstance(sequence, CudaSequence)
        prompt = (*([0] * sequence.length), *tokens)
        out = DeviceMemory(4 * len(tokens) * self.spec.vocab)
        for _ in CudaGeneration(self, Job(prompt, sequence.length, 1), sequence, out.pointer, chunk):
            pass
        sequence.length = len(prompt)
        return out.read(np.empty((len(tokens), self.spec.vocab), np.float32))

    def parameters(self) -> ParamsStruct:
        """What every request of this model shares."""
        return ParamsStruct.from_buffer_copy(self._params)

    def launch(self, params: ParamsStruct) -> None:
        self._memories["exchange"].fill(0xFF, self.kernel.stream)
        self.kernel.launch(self.plan.machine.workers, THREADS, params)

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
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
