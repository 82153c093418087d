"""Makes one Ctrl-C end a command, whatever Python was doing when it came, and a second one end it at once.

Python turns the signal into an exception wherever it happens to be, and some places swallow exceptions: the callback
that every import ends with, destructors, a bare `except` in some package. The command would then go on. So the
exception is raised again until a command says that it has handled it. Other places make another
exception of it, which is why a command asks whether an interrupt is `waiting` before it explains a failure. And where
Python takes a lock, an exception would leave it taken, and a pool whose workers need it would never end. There the
exception comes a moment later.

A process that was started with interrupts ignored, as shells start what a script runs in the background, leaves them
ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended
REPEAT_S = (
    0.25  # swallowed exceptions are rare, and unwinding takes less than this unless it waits for something
)
LOCKED_S = 0.005  # until a lock has been taken, unless another thread has it
#: Functions of the standard library, written in Python, that have just taken or left a lock, or are about to.
_LOCKING = {
    "threading": {"__enter__", "__exit__", "acquire", "release", "_acquire_restore", "_release_save"},
    "importlib._bootstrap": {"__enter__", "__exit__", "acquire", "release", "_get_module_lock", "cb"},
    "logging": {"acquire", "release", "_acquireLock", "_releaseLock"},
}


class Interrupts:
    """The interrupt of this process that has not been handled yet, if there is one."""

    def __init__(self) -> None:
        self._waiting = False

    def install(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGALRM, self._again)
            signal.signal(signal.SIGINT, self._interrupt)

    def uninstall(self) -> None:
        """The command has ended: an alarm would kill Python's own cleanup, and another Ctrl-C may."""
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.answered()

    @property
    def waiting(self) -> bool:
        """Whether an interrupt has come and has not been handled."""
        return self._waiting

    def answered(self) -> None:
        """Called by the handler of a KeyboardInterrupt when everything that it had to end has ended."""
        if self._waiting:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._waiting = False
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that was on its way may have set the next one

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if self._waiting:
            os._exit(INTERRUPTED)  # the first one is being answered, and the user has lost patience
        self._waiting = True
        self._raise(frame)

    def _again(self, _: int, frame: FrameType | None) -> None:
        if not self._waiting:
            return
        if is_unwinding():
            signal.setitimer(signal.ITIMER_REAL, REPEAT_S)
        else:
            self._raise(frame)

    def _raise(self, frame: FrameType | None) -> None:
        if is_locking(frame):
            signal.setitimer(signal.ITIMER_REAL, LOCKED_S)
            return
        signal.setitimer(signal.ITIMER_REAL, REPEAT_S)
        raise KeyboardInterrupt


def is_unwinding() -> bool:
    """Whether this code runs because of a KeyboardInterrupt: in an `except`, a `finally` or the end of a `with`."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


def is_locking(frame: FrameType | None) -> bool:
    """Whether an exception in this frame may leave a lock taken for ever."""
    if frame is None:
        return False
    return frame.f_code.co_name in _LOCKING.get(frame.f_globals.get("__name__", ""), ())


INTERRUPTS = Interrupts()  # signals belong to the process, and so does this
