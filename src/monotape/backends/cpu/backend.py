"""The CPU backend: one native call runs a whole generation on persistent threads, each playing its own tape."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.bridge import (
    FINISH_CANCELLED,
    FINISH_DEADLINE,
    FINISH_LENGTH,
    FINISH_MASK,
    FINISH_NUMERICAL,
    FINISH_RUNNING,
    FINISH_STOP,
    KIND_GENERATE,
    KIND_LOGITS,
    MASKS_AHEAD,
    STAGE_NAMES,
    JobStruct,
    SamplingStruct,
    StatusStruct,
    isa_name,
    library,
)  # fmt: skip
from monotape.backends.cpu.model import DEADLINE_US, LoadedModel, load_model
from monotape.backends.cpu.sequence import CpuSequence
from monotape.backends.protocol import MASK_BITS, Bits, FinishReason, Job, KvSequence, Token
from monotape.errors import BackendError, DeadlineFault, NumericalFault, RequestError, ResourceError
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.types import Plan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress

_WAIT_MS = 100  # how long to wait natively before Python may look at signals
_FINISH: dict[int, FinishReason] = {
    FINISH_STOP: "stop",
    FINISH_LENGTH: "length",
    FINISH_CANCELLED: "cancelled",
}


class CpuBackend:
    """A model on this machine's cores."""

    name = "cpu"

    def __init__(self, spec: ModelSpec, plan: Plan, model: LoadedModel) -> None:
        self.spec, self.plan, self.isa = spec, plan, isa_name()
        self._model = model
        group = None if model.group is None else ctypes.byref(model.group)
        self._engine = library().monotape_open(model.structs, group, self.isa.encode())
        if not self._engine:
            raise ResourceError(
                f"This machine has no room for {len(plan.ranks) * plan.machine.workers} workers and their buffers.",
                "Use fewer --workers or a smaller --max-model-len.",
            )
        self._running: CpuGeneration | None = None  # its arrays must outlive the native side's use of them

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> CpuBackend:
        assert plan.ranks[0].kv.format is not Format.FP8, "the reference alone keeps KV in 8 bits on a CPU"
        return cls(spec, plan, load_model(spec, plan, checkpoint, progress))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded model."""
        return self._model.bytes

    def new_sequence(self) -> CpuSequence:
        return CpuSequence(self.plan)

    def start(self, job: Job, sequence: KvSequence) -> CpuGeneration:
        assert not job.masked, "its masks come from start_masked()"
        generation = CpuGeneration(self._engine, job, self._ready(job, sequence))
        self._begin(generation)
        return generation

    def start_masked(self, job: Job, sequence: KvSequence) -> MaskedCpuGeneration:
        ready = self._ready(job, sequence)
        generation = MaskedCpuGeneration(self._engine, replace(job, masked=True), ready, self.spec.vocab)
        self._begin(generation)
        return generation

    def _ready(self, job: Job, sequence: KvSequence) -> CpuSequence:
        assert isinstance(sequence, CpuSequence) and self._engine, (
            "a sequence of another backend, or a closed one"
        )
        assert job.cached <= sequence.length and job.cached < len(job.prompt)
        sequence.truncate(job.cached)
        sequence.reserve(len(job.prompt) + job.max_tokens)
        return sequence

    def _begin(self, generation: CpuGeneration) -> None:
        previous, self._running = self._running, generation
        try:
            generation.begin()
        except BackendError:  # another job runs, and its arrays must stay
            self._running = previous
            raise

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        assert isinstance(sequence, CpuSequence) and self._engine
        # Positions before `cached` are not read from the prompt, only counted.
        prompt = np.zeros(sequence.length + len(tokens), np.int32)
        prompt[sequence.length :] = tokens
        sequence.reserve(prompt.size)
        out = np.empty((len(tokens), self.spec.vocab), np.float32)
        keys, values = sequence.pointers()
        struct = JobStruct(
            kind=KIND_LOGITS, prompt_length=prompt.size, cached=sequence.length, prompt=prompt.ctypes.data,
            keys=ctypes.addressof(keys), values=ctypes.addressof(values), kv_capacity=sequence.capacity,
            logits=out.ctypes.data, top_logprobs=-1,
        )  # fmt: skip
        _start(self._engine, struct)
        try:
            status = _wait_for_end(self._engine)
        except (
            BaseException
        ):  # an interrupt: the workers still write into `out`, which must not go before they stop
            library().monotape_cancel(self._engine)
            _wait_for_end(self._engine)
            raise
        _raise_fault(status, len(self.plan.ranks))
        if status.finish == FINISH_CANCELLED:  # `out` is not complete, nor is the KV
            raise RequestError("The request was cancelled.")
        sequence.length = prompt.size
        return out

    def delay_words(self, longest_ns: int, seed: int = 0) -> None:
        """For tests and experiments: from the next job on, words between ranks are late by up to this much."""
        library().monotape_delay_words(self._engine, longest_ns, seed)

    def stop_rank(self, rank: int, after_modules: int = 0, deadline_us: int = DEADLINE_US) -> None:
        """For tests of the deadline: from the next job on `rank` stops after `after_modules` modules; -1: none.

        Only waits for that rank's words have this deadline. Healthy ranks wait for each other as long as ever, so that
        a slow machine never lets a test see the wrong fault.
        """
        library().monotape_stop_rank(self._engine, rank, after_modules, deadline_us)

    def cancel_at(self, look: int) -> None:
        """For tests: jobs are cancelled when worker 0 reads the flag for the n-th time; -1: never."""
        library().monotape_cancel_at(self._engine, look)

    def check_all_drafts(self, all_of_them: bool = True) -> None:
        """For tests: from the next job on, drafts are checked wherever there are any, whatever they cost."""
        library().monotape_check_all_drafts(self._engine, all_of_them)

    def pass_times_ns(self) -> tuple[int, int, int]:
        """For tests, between jobs: of a pass alone, of one with drafts, and of all waits for masks in the last job."""
        times = (ctypes.c_int64 * 3)()
        library().monotape_pass_times(self._engine, times)
        alone, with_drafts, waited = times
        return alone, with_drafts, waited

    def wait_for_masks(self, deadline_us: int) -> None:
        """For tests of the deadline: how long the host may take for a mask."""
        library().monotape_mask_deadline(self._engine, deadline_us)

    def looks(self) -> int:
        """The most times that a worker read the cancel flag in the last job: before every tile and every rendezvous."""
        return int(library().monotape_looks(self._engine))

    def close(self) -> None:
        if self._engine:
            library().monotape_close(self._engine)
            self._engine = None

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self.close()


class CpuGeneration:
    """A job that runs on the workers; iterating waits for its tokens."""

    def __init__(self, engine: int, job: Job, sequence: CpuSequence) -> None:
        self.finish_reason: FinishReason | None = None
        self.drafted = self.accepted = 0  # known at the end
        self._engine, self._job, self._sequence = engine, job, sequence
        count, top = job.max_tokens, max(0, job.logprobs or 0)
        self._prompt = np.array(job.prompt, np.int32)
        self._history = _history(job, self._prompt) if job.drafts else None
        self._stop_ids = np.array(job.stop_ids, np.int32)
        self._bias_ids = np.array([token for token, _ in job.sampling.logit_bias], np.int32)
        self._bias_values = np.array([bias for _, bias in job.sampling.logit_bias], np.float32)
        self._ids, self._times = np.empty(count, np.int32), np.empty(count, np.int64)
        self._logprobs = np.empty(count if job.logprobs is not None else 0, np.float32)
        self._top_ids, self._top_values = np.empty((count, top), np.int32), np.empty((count, top), np.float32)
        self._top = top
        self._keys, self._values = sequence.pointers()
        self.start_ns = 0

    def begin(self) -> None:
        """Hands the job to the workers. From here on they write into this object's arrays."""
        _start(self._engine, self._struct(self._top))
        self.start_ns = int(_wait(self._engine, -1).start_ns)

    def _struct(self, top: int) -> JobStruct:
        job = self._job
        return JobStruct(
            kind=KIND_GENERATE, prompt_length=len(job.prompt), cached=job.cached, max_tokens=job.max_tokens,
            min_tokens=job.min_tokens, stop_count=len(job.stop_ids),
            top_logprobs=-1 if job.logprobs is None else top,
            history_length=len(job.prediction) + len(job.prompt), masked=job.masked,
            prompt=self._prompt.ctypes.data, stop_ids=self._stop_ids.ctypes.data,
            history=None if self._history is None else self._history.ctypes.data,
            keys=ctypes.addressof(self._keys), values=ctypes.addressof(self._values),
            kv_capacity=self._sequence.capacity, sampling=self._sampling(),
            ids=self._ids.ctypes.data, times_ns=self._times.ctypes.data,
            logprobs=self._logprobs.ctypes.data, top_ids=self._top_ids.ctypes.data,
            top_values=self._top_values.ctypes.data,
        )  # fmt: skip

    def _sampling(self) -> SamplingStruct:
        sampling = self._job.sampling
        return SamplingStruct(
            temperature=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty, presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty, top_k=sampling.top_k,
            bias_count=self._bias_ids.size, bias_ids=self._bias_ids.ctypes.data,
            bias_values=self._bias_values.ctypes.data, seed=sampling.seed,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Token]:
        seen = 0
        while True:
            status = _wait(self._engine, seen)
            while seen < status.tokens:
                yield self._token(seen)
                seen += 1
            if status.finish != FINISH_RUNNING:
                return self._finished(status)

    @property
    def filled(self) -> int:
        if self.finish_reason is not None:
            return min(self._sequence.length, len(self._job.prompt))
        return min(int(_wait(self._engine, -1).filled), len(self._job.prompt))

    def cancel(self) -> None:
        library().monotape_cancel(self._engine)

    def _token(self, index: int) -> Token:
        if self._job.logprobs is None:
            return Token(int(self._ids[index]), int(self._times[index]))
        top = zip(self._top_ids[index].tolist(), self._top_values[index].tolist(), strict=True)
        return Token(int(self._ids[index]), int(self._times[index]), float(self._logprobs[index]), tuple(top))

    def _finished(self, status: StatusStruct) -> None:
        if self.finish_reason is None:
            _raise_fault(status, len(self._sequence.ranks))
            # Cancelled in prefill, the chunks that were complete by then stay. Forced tokens at the end have no KV.
            self._sequence.length = status.filled
            self.drafted, self.accepted = status.drafted, status.accepted
            self.finish_reason = _FINISH[status.finish]


class MaskedCpuGeneration(CpuGeneration):
    """One whose every token waits for a mask."""

    masks_ahead = MASKS_AHEAD

    def __init__(self, engine: int, job: Job, sequence: CpuSequence, vocab: int) -> None:
        super().__init__(engine, job, sequence)
        self._mask_shape, self._masks_over = (-(-vocab // MASK_BITS),), False
        self._forced = 0  # tokens whose masks are there before allow() is called for them

    def allow(self, bits: Bits) -> None:
        assert bits.shape == self._mask_shape and bits.dtype == np.uint32 and bits.flags.c_contiguous
        if self._forced:
            self._forced -= 1
        elif not self._masks_over:
            library().monotape_allow(self._engine, bits.ctypes.data)

    def expect(self, ids: Sequence[int]) -> None:
        """The whole run at once, so that one pass takes as much of it as it can."""
        further = np.array(ids[self._forced :], np.int32)
        if further.size and not self._masks_over:
            self._forced += library().monotape_force(self._engine, further.ctypes.data, further.size)

    def end_masks(self, *, complete: bool) -> None:
        if self._masks_over:
            return
        self._masks_over = True
        if complete:
            library().monotape_complete(self._engine)
        else:
            self.cancel()

    def await_token(self, index: int) -> int | None:
        while not self._masks_over:
            found = library().monotape_await(self._engine, index, _WAIT_MS)
            if found:
                return int(self._ids[index]) if found > 0 else None
        return None


def _history(job: Job, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    """What drafts are looked up in: the prediction, the prompt, and room for the output."""
    history = np.empty(len(job.prediction) + prompt.size + job.max_tokens, np.int32)
    history[: len(job.prediction)] = np.asarray(job.prediction, np.int32)
    history[len(job.prediction) : len(job.prediction) + prompt.size] = prompt
    return history


def _start(engine: int, struct: JobStruct) -> None:
    started = library().monotape_start(engine, ctypes.byref(struct))
    if started < 0:
        raise ResourceError("There is too little memory to start a job.", "Free some memory and try again.")
    if not started:
        raise BackendError(
            "The CPU backend runs one job at a time and is busy.",
            "Wait for the running generation, or cancel it.",
        )


def _wait(engine: int, seen: int) -> StatusStruct:
    status = StatusStruct()
    library().monotape_wait(engine, seen, _WAIT_MS, ctypes.byref(status))
    return status


def _wait_for_end(engine: int) -> StatusStruct:
    while (status := _wait(engine, 2**31 - 1)).finish == FINISH_RUNNING:
        pass
    return status


def _raise_fault(status: StatusStruct, ranks: int) -> None:
    if status.finish == FINISH_NUMERICAL:
        raise NumericalFault(
            f"The logits at position {status.fault_position} are not numbers.",
            "The weights or the prompt drive the model out of range; try --dtype f32.",
        )
    if status.finish == FINISH_MASK:
        raise DeadlineFault(
            f"The host gave no mask for the choice of a token, at position {status.fault_position}.",
            "The machine is overloaded, or this is a fault in Monotape.",
        )
    if status.finish == FINISH_DEADLINE:
        stage = STAGE_NAMES[status.fault_stage]
        if status.fault_waited_rank >= 0:
            raise DeadlineFault(
                f"Rank {status.fault_rank} waited too long for rank {status.fault_waited_rank} in stage {stage}.",
                "The rank has stopped, the machine is overloaded, or this is a fault in Monotape.",
            )
        where = f" of rank {status.fault_rank}" if ranks > 1 else ""
        raise DeadlineFault(
            f"Worker {status.fault_worker}{where} waited too long for worker {status.fault_waited_for} "
            f"in stage {stage}.",
            "The machine is overloaded, or this is a fault in Monotape; try fewer --workers.",
        )
