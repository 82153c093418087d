"""A running launch: its job's control block goes in, tokens come out of pinned memory as the kernel writes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory, PinnedMemory
from monotape.backends.cuda.params import STAGES, ParamsStruct
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.protocol import FinishReason, Job, Token
from monotape.errors import BackendError, DeadlineFault, NumericalFault

if TYPE_CHECKING:
    from monotape.backends.cuda.backend import CudaBackend

_FINISH: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "cancelled"}
_NUMERICAL, _DEADLINE = 4, 5
_POLL_S = 20e-6
_FINISH_WORD, _TOKENS_WORD, _CANCEL_WORD = 0, 1, 5  # kernels/types.h: HostStatus


class CudaGeneration:
    """Iterating yields the tokens; the launch goes on whether or not anybody iterates."""

    def __init__(
        self, backend: CudaBackend, job: Job, sequence: CudaSequence, logits_out: int = 0, chunk: int | None = None
    ) -> None:  # fmt: skip
        self.finish_reason: FinishReason | None = None
        self._backend, self._job, self._sequence = backend, job, sequence
        self._ids, self._times = PinnedMemory(4 * job.max_tokens), PinnedMemory(8 * job.max_tokens)
        self._status = PinnedMemory(64)
        self._prompt = DeviceMemory.of(np.array(job.prompt, np.int32))
        self._stops = DeviceMemory.of(np.array([*job.stop_ids, -1], np.int32))
        sequence.reserve(min(len(job.prompt) + job.max_tokens, backend.plan.context))
        params = backend.parameters()
        params.kv, params.kv_units = sequence.pointer, sequence.units
        params.prompt, params.stop_ids = self._prompt.pointer, self._stops.pointer
        params.ids, params.times_ns = self._ids.pointer, self._times.pointer
        params.status, params.logits_out = self._status.pointer, logits_out
        params.prompt_length, params.cached = len(job.prompt), job.cached
        params.max_tokens, params.stop_count = job.max_tokens, len(job.stop_ids)
        if chunk is not None:
            params.chunk = chunk
        self._params: ParamsStruct = params
        self.start_ns = time.time_ns()
        backend.launch(params)

    @property
    def _words(self) -> NDArray[np.int32]:
        words: NDArray[np.int32] = self._status.view.view(np.int32)
        return words

    def __iter__(self) -> Iterator[Token]:
        seen, ids, times = 0, self._ids.view.view(np.int32), self._times.view.view(np.int64)
        while True:
            ended = self._backend.kernel.finished()
            while seen < int(self._words[_TOKENS_WORD]):
                yield Token(int(ids[seen]), int(times[seen]))
                seen += 1
            if ended:
                return self._finished(seen)
            time.sleep(_POLL_S)

    def cancel(self) -> None:
        self._words[_CANCEL_WORD] = 1

    def _finished(self, tokens: int) -> None:
        finish, _, worker, stage, layer = (int(value) for value in self._words[:5])
        self._sequence.length = len(self._job.prompt) + tokens - 1 if tokens else self._job.cached
        if finish in (_NUMERICAL, _DEADLINE):
            self._sequence.length = self._job.cached  # what the kernel wrote since cannot be trusted
        if finish == _NUMERICAL:
            raise NumericalFault(
                f"Stage {STAGES[stage]} of layer {layer} gave a value that is not a number (worker {worker}).",
                "The weights may be damaged; try --backend cpu --dtype f32.",
            )
        if finish == _DEADLINE:
            raise DeadlineFault(self._backend.blame(), "This is a fault in Monotape; please report it.")
        if finish not in _FINISH:
            raise BackendError(f"The kernel ended in state {finish}.", "This is a fault in Monotape.")
        self.finish_reason = _FINISH[finish]
