"""Lets one request at a time through to the backend."""

from __future__ import annotations

import threading

from monotape.errors import RequestError


class Turnstile:
    """A lock that any thread may release, and that a thread cannot block itself with."""

    __slots__ = ("_holder", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    @property
    def held_here(self) -> bool:
        """Whether this very thread holds it."""
        return self._holder == threading.get_ident()

    def enter(self) -> None:
        """Waits for the request in progress, unless this very thread has left it open."""
        if self.enter_if_free():
            return
        if self.held_here:
            raise RequestError(
                "This thread has another stream of the same model open.",
                "Read it to its end or close it first; `with llm.stream(...) as stream:` does so.",
            )
        self._lock.acquire()
        self._holder = threading.get_ident()

    def enter_if_free(self) -> bool:
        """Does not wait; says whether the caller holds it now."""
        if not self._lock.acquire(blocking=False):
            return False
        self._holder = threading.get_ident()
        return True

    def leave(self) -> None:
        self._holder = None
        self._lock.release()
