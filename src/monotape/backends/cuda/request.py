"""Memory that host and kernel share for a request: allocated once, used by one request after another."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory, PinnedMemory
from monotape.backends.cuda.params import ParamsStruct, StatusStruct
from monotape.backends.protocol import Job

_ROOM_FOR_STOPS = 64  # ids; more of them are rare, and take new memory


class RequestMemory:
    """Nothing here may be touched for the next request before the kernel of the latest one has ended."""

    def __init__(self, context: int) -> None:
        self._most_tokens = context
        self._status = PinnedMemory(ctypes.sizeof(StatusStruct))
        self.status = StatusStruct.from_address(self._status.pointer)
        self._ids, self._times = PinnedMemory(4 * context), PinnedMemory(8 * context)
        self._make_inputs(context + _ROOM_FOR_STOPS)

    def _make_inputs(self, count: int) -> None:
        self._staged, self._inputs = PinnedMemory(4 * count), DeviceMemory(4 * count)

    @property
    def ids(self) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = self._ids.view.view(np.int32)
        return ids

    @property
    def times_ns(self) -> NDArray[np.int64]:
        times: NDArray[np.int64] = self._times.view.view(np.int64)
        return times

    def begin(
        self, job: Job, params: ParamsStruct, stream: Any, *, whole_prompt: bool, drafts: bool = False
    ) -> None:
        """Clears the status, and queues the copy of the kernel's inputs on `stream`.

        There is one copy and no wait: either would delay the first token.
        """
        assert job.max_tokens <= self._most_tokens
        if drafts:
            self._send_history(job, params, stream)
        else:
            self._send_prompt(job, params, stream, 0 if whole_prompt else job.cached)
        ctypes.memset(self._status.pointer, 0, ctypes.sizeof(StatusStruct))
        self.status.worker = -1  # until a worker reports where a fault came from
        params.status = self._status.pointer
        params.ids, params.times_ns = self._ids.pointer, self._times.pointer
        params.prompt_length, params.cached = len(job.prompt), job.cached
        params.max_tokens, params.stop_count = job.max_tokens, len(job.stop_ids)

    def _send_prompt(self, job: Job, params: ParamsStruct, stream: Any, first: int) -> None:
        """The prompt from `first` on, then the stop ids. Cached ids are read only where penalties count them."""
        prompt, stops = len(job.prompt), len(job.stop_ids)
        staged = self._staged_room(prompt + stops)
        staged[first:prompt] = np.asarray(job.prompt[first:], np.int32)
        staged[prompt : prompt + stops] = job.stop_ids
        start, count = 4 * first, 4 * (prompt + stops - first)
        self._inputs.copy_in(self._staged.pointer + start, count, start, stream)
        params.prompt, params.stop_ids = self._inputs.pointer, self._inputs.pointer + 4 * prompt
        params.history, params.history_length = 0, 0

    def _send_history(self, job: Job, params: ParamsStruct, stream: Any) -> None:
        """The stop ids, then what drafts are looked up in: the prediction, the prompt, and room for the output."""
        stops, predicted = len(job.stop_ids), len(job.prediction)
        sent = stops + predicted + len(job.prompt)
        staged = self._staged_room(sent + job.max_tokens)
        staged[:stops] = job.stop_ids
        staged[stops : stops + predicted] = np.asarray(job.prediction, np.int32)
        staged[stops + predicted : sent] = np.asarray(job.prompt, np.int32)
        self._inputs.copy_in(self._staged.pointer, 4 * sent, 0, stream)
        first = self._inputs.pointer
        params.stop_ids, params.history = first, first + 4 * stops
        params.prompt = first + 4 * (stops + predicted)
        params.history_length = sent - stops

    def _staged_room(self, count: int) -> NDArray[np.int32]:
        if 4 * count > self._inputs.bytes:
            self._make_inputs(count + _ROOM_FOR_STOPS)
        staged: NDArray[np.int32] = self._staged.view.view(np.int32)
        return staged

    def close(self) -> None:
        for memory in (self._status, self._ids, self._times, self._staged, self._inputs):
            memory.close()
