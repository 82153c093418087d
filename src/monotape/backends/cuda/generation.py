"""A request as the engine sees it: tokens as they come, from one launch, or from one launch per rank."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from monotape.backends.cuda.launch import POLL_S, Running
from monotape.backends.cuda.masks import Verdict
from monotape.backends.protocol import Bits, FinishReason, Job, Token


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C has its effect at the end of the `with` block. Python's handlers run in the main thread alone."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:  # a second one does not wait: the driver may hang
            handler(number, frame)
        held = True

    try:
        signal.signal(signal.SIGINT, hold)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


class CudaGeneration:
    """Iterating yields the tokens; the launch runs on between calls. Dropping the iterator cancels it."""

    def __init__(
        self, backend: Any, job: Job, sequence: Any, chunk: int | None = None
    ) -> None:  # of one rank or of several, with a sequence of that kind
        self._launch: Running
        before = time.perf_counter_ns()
        try:
            with _interrupts_held():  # a kernel must not run without what cancels it
                self._launch = backend.begin(job, sequence, chunk=chunk)
            self.launch_ns = time.perf_counter_ns() - before  # of the host, all before the kernel's own start
        except BaseException:
            self._abandon()  # a traceback may keep this object for long
            raise

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._launch.finish_reason

    @property
    def start_ns(self) -> int:
        """When the kernel began, by the GPU's own clock; waits for that."""
        while not self._launch.start_ns and not self._launch.collect():
            time.sleep(POLL_S)
        return self._launch.start_ns

    @property
    def filled(self) -> int:
        """Tokens of the prompt whose KV is complete; the kernel reports it after each chunk."""
        self._launch.collect()
        return self._launch.filled

    @property
    def drafted(self) -> int:
        return self._launch.drafted

    @property
    def accepted(self) -> int:
        return self._launch.accepted

    def __iter__(self) -> Iterator[Token]:
        launch, seen = self._launch, 0
        try:
            while True:
                ended = launch.collect()
                while seen < len(launch.tokens):
                    yield launch.tokens[seen]
                    seen += 1
                if ended:
                    break
                time.sleep(POLL_S)
        except BaseException:  # the caller has lost interest in the iterator, or was interrupted
            launch.abandon()
            raise
        launch.raise_fault()

    def cancel(self) -> None:
        self._launch.cancel()

    def _abandon(self) -> None:
        """Ends the launch, if there is one."""
        launch: Running | None = getattr(self, "_launch", None)
        if launch is not None:
            launch.abandon()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._abandon()


class MaskedCudaGeneration(CudaGeneration):
    """One whose every token waits for a mask."""

    def __init__(self, backend: Any, job: Job, sequence: Any, chunk: int | None = None) -> None:
        self.masks_ahead = backend.masks.masks - 1
        super().__init__(backend, job, sequence, chunk)

    def allow(self, bits: Bits) -> None:
        self._launch.write_mask(Verdict.GO_ON, bits)

    def expect(self, ids: Sequence[int]) -> None:
        self._launch.expect(ids)

    def end_masks(self, *, complete: bool) -> None:
        self._launch.write_mask(Verdict.COMPLETE if complete else Verdict.CANCELLED)

    def await_token(self, index: int) -> int | None:
        launch = self._launch
        while (token := launch.mailed(index)) is None and not launch.masks_over:
            time.sleep(POLL_S)
        return token
