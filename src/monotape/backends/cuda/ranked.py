"""Several ranks of one model, each a launch of its own: on a GPU each, or on parts of one GPU that share nothing else.

A rank is a CudaBackend with its share of the plan. Ranks talk through their inboxes (links.py) and in no other way. All
of them choose the same tokens; rank 0 reports tokens and status.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.blame import sentence
from monotape.backends.cuda.driver import DeviceMemory, Kernel, allow_peers, memory_free_and_total, on_device
from monotape.backends.cuda.generation import CudaGeneration, MaskedCudaGeneration
from monotape.backends.cuda.launch import Launch, Running, require_idle
from monotape.backends.cuda.links import Numbers
from monotape.backends.cuda.masks import MaskTable, Verdict
from monotape.backends.cuda.memory import memory_plan, require_memory
from monotape.backends.cuda.params import ParamsStruct
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.protocol import Bits, Job, KvSequence
from monotape.backends.token_ids import TokenIds
from monotape.errors import BackendError, DeadlineFault, NumericalFault, ResourceError
from monotape.models.spec import ModelSpec
from monotape.plan.gpu import GpuPlan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress

_SAME_ON_A_GPU = ("embedding", "cosines", "sines", "windows")  # read-only for all ranks


class RankedSequence:
    """The KV of one conversation: every rank has that of its own heads."""

    def __init__(self, parts: Sequence[CudaSequence]) -> None:
        self.parts = tuple(parts)

    @property
    def length(self) -> int:
        return self.parts[0].length

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def truncate(self, length: int) -> None:
        for part in self.parts:
            part.truncate(length)

    def reserve(self, positions: int) -> None:
        for part in self.parts:
            part.reserve(positions)

    def shrink(self) -> bool:
        shrunk = [part.shrink() for part in self.parts]  # of all ranks, not only up to the first that did
        return any(shrunk)

    def copy_from(self, other: KvSequence, length: int) -> None:
        assert isinstance(other, RankedSequence)
        for part, theirs in zip(self.parts, other.parts, strict=True):
            part.copy_from(theirs, length)


class RankedLaunch(Running):
    """The launches of all ranks until the last has ended; rank 0 reports tokens and status."""

    def __init__(
        self, backend: RankedCudaBackend, launches: Sequence[Launch], sequence: RankedSequence
    ) -> None:
        super().__init__()
        self._backend, self._launches, self._sequence = backend, tuple(launches), sequence
        self.tokens = launches[0].tokens

    def collect(self) -> bool:
        """Collects what the kernels have reported since the last call; True when all have ended."""
        with self._lock:
            if not self.ended:
                ended = [launch.collect() for launch in self._launches]  # each of them, ended or not
                self.start_ns = self._launches[0].start_ns
                self.filled = min(launch.filled for launch in self._launches)
                if all(ended):
                    self._end()
            return self.ended

    def _end(self) -> None:
        self.fault = self._find_fault()
        if self.fault is None:
            first = self._launches[0]
            self.finish_reason, self.drafted, self.accepted = (
                first.finish_reason, first.drafted, first.accepted,
            )  # fmt: skip
        else:
            for part in self._sequence.parts:
                part.clear()
        self.ended = True
        del self._backend, self._sequence

    def _find_fault(self) -> BackendError | None:
        """Whatever stopped one rank ends the others at their deadline; that is the least of what can be said."""
        broken = [launch for launch in self._launches if launch.fault is not None]
        not_numbers = [launch for launch in broken if isinstance(launch.fault, NumericalFault)]
        if not_numbers:  # they spread to all ranks: where were they first?
            return min(not_numbers, key=lambda launch: launch.fault_place).fault
        deadlines = [launch.fault for launch in broken if isinstance(launch.fault, DeadlineFault)]
        if deadlines:
            try:
                return self._backend.name_deadline(deadlines[0])
            except BackendError as error:  # a broken GPU does not even say what it waited for
                return error
        if broken:
            return broken[0].fault
        chosen = [[token.id for token in launch.tokens] for launch in self._launches]
        if any(tokens != chosen[0] for tokens in chosen):
            return BackendError(
                "Ranks chose different tokens.", "This is a fault in Monotape; please report it."
            )
        return None

    def cancel(self) -> None:
        """Cancels rank 0, which passes it on to the others."""
        self._launches[0].cancel()

    def write_mask(self, verdict: Verdict, bits: Bits | None = None) -> None:
        """Into the table of rank 0, which all ranks read."""
        self._launches[0].write_mask(verdict, bits)

    def expect(self, ids: Sequence[int]) -> None:
        self._launches[0].expect(ids)

    @property
    def masks_over(self) -> bool:
        return self._launches[0].masks_over

    def mailed(self, index: int) -> int | None:
        """Of rank 0: it mails a token after all ranks have chosen it."""
        return self._launches[0].mailed(index)


class RankedCudaBackend:
    """A model on several ranks."""

    name = "cuda"
    rank_type: ClassVar[type[CudaBackend]] = CudaBackend

    def __init__(self, ranks: Sequence[CudaBackend]) -> None:
        self.ranks = tuple(ranks)
        self.spec, self.plan = ranks[0].spec, ranks[0].plan
        self._stopped: tuple[int, int] | None = None
        self._launch: RankedLaunch | None = None
        self._lock = threading.RLock()
        self._numbers = Numbers()
        self._inboxes = [rank.inbox for rank in self.ranks if rank.inbox is not None]
        for rank in self.ranks:
            rank.connect(self._inboxes)
            rank.kernel.load_now()

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: GpuPlan, checkpoint: Checkpoint, progress: Progress | None = None, *,
        devices: Sequence[int],
    ) -> RankedCudaBackend:  # fmt: skip
        """`devices`: the GPU of each rank. Ranks on the same one share what is only read."""
        assert len(devices) == len(plan.ranks) > 1
        if len(set(devices)) > 1:
            allow_peers(max(devices) + 1)
            for number, index in enumerate(devices):  # weights take minutes; what cannot be is said before
                with on_device(index):
                    free, _ = memory_free_and_total()
                    require_memory(memory_plan(plan, number), free, f"GPU {index}")
        ranks: list[CudaBackend] = []
        shared: dict[int, dict[str, DeviceMemory]] = {}
        try:
            for number, index in enumerate(devices):
                with on_device(index):
                    rank = cls.rank_type.load(
                        spec, plan, checkpoint, progress, rank=number, shared=shared.get(index)
                    )
                ranks.append(rank)
                shared.setdefault(index, rank.memories_of(_SAME_ON_A_GPU))
            return cls(ranks)
        except BaseException:
            for rank in ranks:
                rank.close()
            raise

    @property
    def gpu_plan(self) -> GpuPlan:
        return self.ranks[0].gpu_plan

    @property
    def kernel(self) -> Kernel:
        """Rank 0's kernel, for callers that count launches."""
        return self.ranks[0].kernel

    def new_sequence(self) -> RankedSequence:
        return RankedSequence([rank.new_sequence() for rank in self.ranks])

    def start(self, job: Job, sequence: KvSequence) -> CudaGeneration:
        assert isinstance(sequence, RankedSequence), "a sequence of another backend"
        return CudaGeneration(self, job, sequence)

    @property
    def masks(self) -> MaskTable:
        """That of rank 0, which all ranks read."""
        return self.ranks[0].masks

    def start_masked(self, job: Job, sequence: KvSequence) -> MaskedCudaGeneration:
        assert isinstance(sequence, RankedSequence), "a sequence of another backend"
        return MaskedCudaGeneration(self, replace(job, masked=True), sequence)

    def begin(
        self, job: Job, sequence: RankedSequence, *, chunk: int | None = None, logits_out: int = 0
    ) -> RankedLaunch:
        """Launches a job on all ranks. Everything is ready before the first of them starts. `chunk` as of one rank."""
        with self._lock:
            require_idle(self._launch)
            prepared = []
            for rank, part in zip(self.ranks, sequence.parts, strict=True):
                with on_device(rank.device):
                    own_job = self._job_of(rank, job)
                    masks = self.masks if rank is not self.ranks[0] else None
                    prepared.append(
                        rank.prepare(own_job, part, chunk=chunk, logits_out=logits_out, masks=masks)
                    )
            # After the last thing that may fail: ranks that count differently would wait for each other for ever.
            self.ranks[0].number([params for _, params in prepared], self._numbers, self._inboxes)
            launches = [launch for launch, _ in prepared]
            self._launch = RankedLaunch(self, launches, sequence)
            self._launch_all(prepared, sequence)
            return self._launch

    def _launch_all(self, prepared: Sequence[tuple[Launch, ParamsStruct]], sequence: RankedSequence) -> None:
        """All ranks or none: one that runs without the others ends at its deadline, and nothing may run until then."""
        running: list[Launch] = []
        try:
            for rank, (launch, params) in zip(self.ranks, prepared, strict=True):
                if self._stopped != (rank.rank, 0):
                    rank.launch(launch, params)
                    running.append(launch)
        except BaseException as error:
            for launch in running:
                launch.abandon()
            for part in sequence.parts:
                part.clear()  # those of ranks that ran are no longer as they were
            self._launch = None
            if isinstance(error, ResourceError):  # a smaller cache would not help, so it is not asked for
                raise BackendError(error.message, error.hint) from error
            raise

    def _job_of(self, rank: CudaBackend, job: Job) -> Job:
        if self._stopped is None or self._stopped[0] != rank.rank or not self._stopped[1]:
            return job
        return replace(job, max_tokens=min(job.max_tokens, self._stopped[1]))

    def logits(
        self, tokens: Sequence[int], sequence: KvSequence, chunk: int | None = None
    ) -> NDArray[np.float32]:
        """As the protocol has it. Every rank writes its own words of each row into the memory of rank 0's GPU."""
        assert isinstance(sequence, RankedSequence), "a sequence of another backend"
        prompt = TokenIds.joined(np.zeros(sequence.length, np.int32), tokens)  # cached ids are not read
        with on_device(self.ranks[0].device):
            out = DeviceMemory(4 * len(tokens) * self.spec.vocab)
        job = Job(prompt, sequence.length, 1)
        try:
            self.begin(job, sequence, chunk=chunk, logits_out=out.pointer).finish()
            for part in sequence.parts:
                part.length = len(prompt)
            return out.read(np.empty((len(tokens), self.spec.vocab), np.float32))
        finally:
            out.close()  # the traceback of a fault would keep it

    def name_deadline(self, fault: DeadlineFault) -> DeadlineFault:
        """The same fault as all ranks together explain it."""
        waits = [wait for rank in self.ranks for wait in rank.waits()]
        return DeadlineFault(sentence(waits, len(self.ranks)), fault.hint)

    def stop_rank(self, rank: int | None, after: int = 0) -> None:
        """For tests of the deadline: this rank ends after `after` tokens; with 0 it is not even launched."""
        self._stopped = None if rank is None else (rank, after)

    def delay_links(self, nanoseconds: int) -> None:
        for rank in self.ranks:
            rank.delay_links(nanoseconds)

    def close(self) -> None:
        with self._lock:
            if self._launch is not None:
                self._launch.abandon()
            for rank in self.ranks:
                rank.close()
