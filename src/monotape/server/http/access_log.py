"""One line in the log for every request: what was asked for, how it ended, and what it cost."""

from __future__ import annotations

import logging

from starlette.types import Scope

from monotape.server.api_error import ApiError
from monotape.server.service.clock import Clock

LOG = logging.getLogger("monotape.access")
_LONGEST = 300
_QUIET = ("/health", "/metrics")  # asked for every few seconds by machines


def note_error(scope: Scope, error: ApiError) -> None:
    """Keeps an error for the request's line."""
    scope["state"]["error"] = error


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Writes the line. A status of 0: the client left before there was one."""
    quiet = status == 200 and scope["path"] in _QUIET
    LOG.log(logging.DEBUG if quiet else logging.INFO, "%s", line(scope, status, seconds))


def line(scope: Scope, status: int, seconds: float) -> str:
    state = scope["state"]
    clock: Clock | None = state.get("clock")
    error: ApiError | None = state.get("error")
    ended = "left" if state.get("left") or not status else str(status)
    parts = [f"{scope['method']} {printable(scope['path'])} {ended} in {seconds:.2f} s"]
    if clock is not None and clock.done:
        parts.append(clock.summary())
    if error is not None:
        parts.append(printable(error.message))
    return f"{': '.join(parts)} [{state['request_id']}]"


def printable(text: str) -> str:
    """Text of a client, which must not write lines of its own into the log or move the cursor of a terminal."""
    shown = text.encode("unicode_escape").decode()
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
