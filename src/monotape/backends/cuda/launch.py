"""A launch from its start to its end: the kernel writes into pinned memory, and this reads it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from monotape.backends.cuda.driver import Kernel
from monotape.backends.cuda.masks import MaskWriter, Verdict
from monotape.backends.cuda.request import RequestMemory
from monotape.backends.cuda.sampling import SamplingMemory
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.protocol import Bits, FinishReason, Job, Token
from monotape.errors import BackendError, DeadlineFault, NumericalFault
from monotape.plan.gpu import GpuRank

POLL_S = 20e-6
_FINISH: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "cancelled"}
_RUNNING, _NUMERICAL, _DEADLINE = 0, 4, 5
_POLLS_PER_LOOK = 64  # a kernel that ended without a word is noticed too, but asking the driver is slow


class Running(ABC):
    """What computes a request, one launch or one a rank, until it has ended. Any thread may call anything."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self.fault: BackendError | None = None
        self.ended = False
        self.start_ns = 0
        self.filled = 0  # tokens of the prompt whose KV is complete, cached ones included
        self.drafted = self.accepted = 0  # drafts, and those that were what followed; known at the end
        # The garbage collector may end an abandoned generation while this thread is in here: a lock it can take again.
        self._lock = threading.RLock()

    @abstractmethod
    def collect(self) -> bool:
        """Collects tokens and status that have come since the last call; True when the request has ended."""

    @abstractmethod
    def cancel(self) -> None:
        """Asks for the end."""

    @abstractmethod
    def write_mask(self, verdict: Verdict, bits: Bits | None = None) -> None:
        """The next mask of a masked job; nothing once it has ended."""

    @abstractmethod
    def expect(self, ids: Sequence[int]) -> None:
        """Tokens that the next masks will allow, each alone."""

    @abstractmethod
    def mailed(self, index: int) -> int | None:
        """Token number `index` if the kernel has mailed it, seen by `collect` or not; None once masks are over."""

    @property
    @abstractmethod
    def masks_over(self) -> bool: ...

    def wait(self) -> None:
        while not self.collect():
            time.sleep(POLL_S)

    def abandon(self) -> None:
        """Cancels the request and returns when it has ended."""
        self.cancel()
        self.wait()

    def finish(self) -> None:
        """Waits for the end, whatever happens meanwhile; a fault is raised."""
        try:
            self.wait()
        except BaseException:  # an interrupt: kernels still write into memory of this request
            self.abandon()
            raise
        self.raise_fault()

    def raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault


def require_idle(running: Running | None) -> None:
    if running is not None and not running.collect():
        raise BackendError(
            "The CUDA backend runs one job at a time and is busy.",
            "Wait for the running generation, or cancel it.",
        )


class Latest:
    """The latest launch of the kernels that share a model: one of them runs at a time."""

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self.lock = threading.RLock()


class Launcher(Protocol):
    """What a launch asks its backend."""

    @property
    def gpu_rank(self) -> GpuRank: ...
    @property
    def request_memory(self) -> RequestMemory: ...
    def blame(self) -> str: ...


class Launch(Running):
    """One launch, and the tokens and status that it has reported.

    It keeps alive all memory that the kernel uses, and lets go of it when the kernel has ended.
    """

    def __init__(
        self, backend: Launcher, kernel: Kernel, job: Job, sequence: CudaSequence, sampling: SamplingMemory,
        masks: MaskWriter | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # Layer and order of the stage, of values that are not numbers.
        self.fault_place: tuple[int, int] = (0, 0)
        self._backend, self.kernel, self._job = backend, kernel, job
        self.filled = job.cached
        self._sequence, self._sampling = sequence, sampling
        self._memory = backend.request_memory
        self._polls = 0
        # A lock of its own: masks are given while another thread collects, and that may take long.
        self._masks, self._mask_lock = masks, threading.RLock()

    def collect(self) -> bool:
        """Collects what the kernel has reported since the last call; True when it has ended."""
        with self._lock:
            if self.ended:
                return True
            status = self._memory.status
            self.start_ns = status.start_ns
            told = status.finish != _RUNNING
            self._take_progress()
            self._polls += 1
            if told or self._polls % _POLLS_PER_LOOK == 0:
                self._end_if_over()
            return self.ended

    def _take_progress(self) -> None:
        count, known = self._memory.status.tokens, len(self.tokens)
        self.filled = len(self._job.prompt) if count else max(self.filled, self._memory.status.filled)
        if count > known:
            ids, times = self._memory.ids[known:count].tolist(), self._memory.times_ns[known:count].tolist()
            for index, (token, time_ns) in enumerate(zip(ids, times, strict=True), known):
                self.tokens.append(self._sampling.token(index, token, time_ns))

    def _end_if_over(self) -> None:
        try:
            if not self.kernel.finished():
                return
            self._take_progress()
            self.start_ns = self._memory.status.start_ns
            self.fault = self._find_fault()
        except BackendError as error:  # the driver's own: nothing on this GPU works any more
            self.fault = error
        if self.fault is None:
            # The last token's own KV is not there yet. Cancelled in prefill, whole chunks are.
            self._sequence.length = self.filled + max(0, len(self.tokens) - 1)
            self.finish_reason = _FINISH[self._memory.status.finish]
            self.drafted, self.accepted = self._memory.status.drafted, self._memory.status.accepted
        else:
            self._sequence.clear()  # what is not a number in there would spoil everything after it
        with self._mask_lock:  # the table and the ids are the next request's from here on
            self.ended = True
            self._masks = None
        del self._backend, self._sequence, self._sampling

    def _find_fault(self) -> BackendError | None:
        status = self._memory.status
        if status.finish == _NUMERICAL:
            rank = self._backend.gpu_rank
            self.fault_place = (status.layer, rank.stage_order[status.stage])
            inside = status.layer < rank.dimensions.layers
            place = f"Stage {rank.stage_names[status.stage]}" + (
                f" of layer {status.layer}" if inside else ""
            )
            return NumericalFault(
                f"{place} gave values that are not numbers (worker {status.worker})."
                if status.worker >= 0
                else "The logits are not numbers.",
                "The weights may be damaged; try --backend cpu --dtype f32.",
            )
        if status.finish == _DEADLINE:
            return DeadlineFault(self._backend.blame(), "This is a fault in Monotape; please report it.")
        if status.finish not in _FINISH:
            return BackendError(f"The kernel ended in state {status.finish}.", "This is a fault in Monotape.")
        return None

    def cancel(self) -> None:
        """Asks the kernel to end. Never the next request's kernel, however late this comes."""
        self.write_mask(Verdict.CANCELLED)  # a kernel that waits for a mask looks at nothing else
        with self._lock:
            if not self.ended:
                self._memory.status.cancel = 1

    def write_mask(self, verdict: Verdict, bits: Bits | None = None) -> None:
        with self._mask_lock:
            if self._masks is not None:
                self._masks.write(verdict, bits)

    def expect(self, ids: Sequence[int]) -> None:
        with self._mask_lock:
            if self._masks is not None:
                self._masks.expect(ids)

    @property
    def masks_over(self) -> bool:
        masks = self._masks
        return masks is None or masks.over

    def mailed(self, index: int) -> int | None:
        with self._mask_lock:
            if self.masks_over or self._memory.status.tokens <= index:
                return None
            return int(self._memory.ids[index])
