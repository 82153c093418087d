"""How far a prompt has been read, for the client of a stream: comments, or chunks where those are wanted."""

from __future__ import annotations

import time
from typing import Any

from monotape.server.engine import wire
from monotape.server.http.replies import sse
from monotape.server.service.service import Work


class Reading:
    """The prompt of one completion. llama.cpp's names: `processed` counts the `cache` too."""

    def __init__(self, work: Work, head: dict[str, Any] | None = None) -> None:
        """`head`: that of chunks, for a client that wants them instead of comments."""
        self._work, self._head = work, head
        self._cached: int | None = None  # until the engine has said it, as it begins with this prompt
        self._began_ns = 0  # then
        self._read = 0

    def told(self, piece: wire.Piece) -> bytes:
        """What the client is told before a piece of its answer."""
        if self._head is None:
            return self.comment(piece)
        step = self.last() if piece.read is None else self.step(piece.read)
        return b"" if step is None else sse({**self._head, "choices": [], "prompt_progress": step})

    def comment(self, piece: wire.Piece | None) -> bytes:
        """A line that clients skip and that keeps proxies from closing the connection; nothing for other pieces."""
        if piece is None or piece.read is None or self.step(piece.read)["processed"] == self._cached:
            return b""
        return f": {piece.read} of {len(self._work.prompt)} prompt tokens read\n\n".encode()

    def step(self, read: int) -> dict[str, Any]:
        now_ns = time.monotonic_ns()
        if self._cached is None:
            self._cached, self._began_ns = read, now_ns
        self._read = read
        took_ms = (now_ns - self._began_ns) / 1e6
        total = len(self._work.prompt)
        return {"total": total, "cache": self._cached, "processed": read, "time_ms": round(took_ms)}

    def last(self) -> dict[str, Any] | None:
        """The step to the end, when the first token comes; None where it has been shown."""
        if self._cached is None or self._read >= len(self._work.prompt):
            return None
        return self.step(len(self._work.prompt))
