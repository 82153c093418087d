"""When an engine that has died is started again, and when the server gives up so that its supervisor acts."""

from __future__ import annotations

import signal

from monotape.server.engine import wire

_LONGEST_PAUSE_S = 60
_MAX_CRASHES = 3  # in a row, while loading


class Restarts:
    """What the deaths so far say about the next start.

    If a model has never been loaded here, the configuration is most likely wrong, and the server should fail at once. A
    model that has been loaded before will most likely load again: its file may be away for a moment, or memory short.
    """

    def __init__(self) -> None:
        self._loaded = False
        self._failed = 0  # starts in a row

    def after(self, was_ready: bool, cause: wire.LoadFailed | None, exit_code: int | None) -> float | str:
        """Seconds to wait before the next start, or the sentence with which the server ends.

        `cause` is what the process said about its end, if it said anything; `exit_code` is Popen's.
        """
        if was_ready:
            self._loaded, self._failed = True, 0
            return 0.0
        self._failed += 1
        if cause is not None and (cause.lasting or not self._loaded):
            return f"{cause.message} {cause.hint}".strip()
        # The kernel kills where memory is short; anything else that ends a start will end the next one too.
        crashed = cause is None and not (self._loaded and exit_code == -signal.SIGKILL)
        if crashed and self._failed >= _MAX_CRASHES:
            return f"The engine process died {self._failed} times while loading ({died_of(exit_code)})."
        return float(min(_LONGEST_PAUSE_S, 2 ** (self._failed - 1)))


def died_of(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"of {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
