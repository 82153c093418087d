"""Short naps of a thread that others wait for."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30  # from Linux's prctl.h
_SLACK_NS = 1000


def end_naps_on_time() -> None:
    """Lets this thread wake up when a nap is over. Linux may otherwise add 50 us, two and a half naps of 20 us more.

    Where there is no such thing, naps take as long as they do.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_TIMERSLACK, _SLACK_NS)


def timer_slack_ns() -> int:
    """What Linux may add to a nap of this thread; -1 where that is not known."""
    return _prctl(_PR_GET_TIMERSLACK, 0) if sys.platform == "linux" else -1


def _prctl(option: int, value: int) -> int:
    try:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))
    except (OSError, AttributeError):  # a C library without prctl
        return -1
