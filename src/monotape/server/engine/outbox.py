"""Sends the engine's text, a few milliseconds' worth at a time, so that sending is never the bottleneck."""

from __future__ import annotations

import socket
import threading
import time

from monotape.server.engine import wire
from monotape.server.frames import frame

FLUSH_S = 0.005


class Outbox:
    """Gathers the pieces of a running completion and sends them from a thread of its own.

    The first piece of a completion and everything that is not a piece go out at once. A slow reader at the other end
    never holds up the engine: the pieces that wait here are at most one answer.
    """

    def __init__(self, connection: socket.socket, flush_s: float = FLUSH_S) -> None:
        self._connection, self._flush_s = connection, flush_s
        self._changed = threading.Condition()
        self._waiting: list[wire.FromEngine] = []
        self._held: wire.Piece | None = None
        self._interval: int | None = None
        self._urgent = self._closed = False
        self._last_sent = 0.0
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    def begin(self, interval: int | None) -> None:
        """A new completion: its first piece is urgent."""
        self._interval, self._urgent = interval, True

    def put(self, message: wire.FromEngine) -> None:
        """Sends a message at once, after everything before it; a beat belongs to no completion and hurries none."""
        with self._changed:
            if not isinstance(message, wire.Beat):
                self._release()
            self._waiting.append(message)
            self._changed.notify()

    def put_piece(self, piece: wire.Piece) -> None:
        with self._changed:
            held = self._held
            if held is None:
                self._held = piece
            else:
                held.text += piece.text
                held.token_ids += piece.token_ids
                held.decode_ns = piece.decode_ns
                if held.chosen is not None and piece.chosen is not None:
                    held.chosen += piece.chosen
            assert self._held is not None
            full = self._interval is not None and len(self._held.token_ids) >= self._interval
            if (self._urgent and self._held.text) or full:
                self._urgent = False
                self._release()
                self._changed.notify()
            elif held is None:
                self._changed.notify()

    def close(self) -> None:
        """Sends what is left."""
        with self._changed:
            self._release()
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _release(self) -> None:
        if self._held is not None:
            self._waiting.append(self._held)
            self._held = None

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._held or self._closed)
                if not self._waiting and self._held is not None and self._interval is None:
                    left = self._last_sent + self._flush_s - time.monotonic()
                    if left > 0:
                        self._changed.wait_for(lambda: self._waiting or self._closed, left)
                    self._release()
                elif not self._waiting and self._held is not None:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
                messages, self._waiting = self._waiting, []
                ended = self._closed and not messages
            if ended:
                return
            self._last_sent = time.monotonic()
            try:
                self._connection.sendall(b"".join(map(frame, messages)))
            except OSError:  # the server is gone; the reader's end of this process notices and ends it
                return
