"""Waiting for things that must come. A condition is looked at again and again, and a slow machine has time enough."""

from __future__ import annotations

import time
from collections.abc import Callable

#: After which what should have come counts as missing. No test takes as long on a machine that is ten times slower.
PATIENCE_S = 240.0


def until(condition: Callable[[], object], what: object = "it") -> None:
    """Returns when the condition holds; `what` is named if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what() if callable(what) else what} did not come"
        time.sleep(0.02)
