"""One connection under limits: uvicorn's protocol bounds neither the headers nor the time it waits for them.

The parser keeps a header until it is complete, and uvicorn keeps all headers of a request, pipelined requests until
their turn, and a connection for as long as its client likes. All that happens before any key is checked, so this class
counts and times it. A connection is always in one of three states:

    waiting    for a request or the rest of its headers: `head_s`, or `idle_s` after an answer
    reading    a body: `body_s`, or `linger_s` once it is answered
    answering  the request is complete: no limit, except that the client reads what is sent within `stall_s`

When there are too many connections the one that has been waiting or reading longest gives way to a new one, so that
idle connections cannot lock others out. Only when all are being answered is a new one refused.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from monotape.server.api_error import ApiError
from monotape.server.http.limits import Limits
from monotape.server.http.replies import encode

_LAST_S = 2.0  # for an error to reach its client before the connection is cut
_MOST_DROPPED = 1 << 20  # bytes that a client may send while it does


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with `limits`."""

    limits: ClassVar[Limits] = Limits()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._since = self.loop.time()  # when the present state began
        self._answering = False
        self._reading = False  # a request has begun and is not complete
        self._loose = 0  # bytes since the last that belonged to a body or ended a request's headers
        self._fields = self._field_bytes = 0
        self._refusal: ApiError | None = None  # why the parser was stopped
        self._refused = False  # nothing more is read
        self._dropped = 0  # bytes that came after that

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._make_room():
            message = f"The server has {self.limits.connections} connections and answers on all of them."
            self._refuse(ApiError(503, message, code="too_many_connections", headers={"retry-after": "1"}))
            return
        self._wait(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _make_room(self) -> bool:
        """Cuts the connections that have kept the server waiting longest; False when the rest are still too many."""
        if len(self.connections) <= self.limits.connections:
            return True
        waiting = [
            other for other in self.connections
            if isinstance(other, LimitedConnection) and other is not self and not other._answering
        ]  # fmt: skip
        waiting.sort(key=lambda other: other._since)
        for oldest in waiting[: len(self.connections) - self.limits.connections]:
            self.connections.discard(oldest)  # now, not when the event loop runs its callback
            oldest.transport.abort()
        return len(self.connections) <= self.limits.connections

    # Bytes.

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._dropped += len(data)
            if self._dropped > _MOST_DROPPED:
                self.transport.abort()
            return
        if not self._answering and not self._reading:
            self._reading = True
            self._wait(self.limits.head_s)
        self._loose += len(data)
        super().data_received(data)
        if self._loose > self.limits.head_bytes and not self._refused:
            self._refuse(self.limits.headers_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = True
        self._fields = self._field_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for what stands after a chunked body."""
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if self._fields > self.limits.head_fields or self._field_bytes > self.limits.head_bytes:
            self._stop(self.limits.headers_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._loose = 0
        if len(self.pipeline) >= self.limits.pipelined:
            self._stop(ApiError(400, f"At most {self.limits.pipelined} requests may come before an answer."))
        super().on_headers_complete()
        if not self._answering:
            self._wait(self.limits.body_s)

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._loose = 0
        self._reading = False
        super().on_message_complete()
        if self.cycle.response_complete:
            self._wait(self.limits.idle_s)
        else:
            self._answering = True
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        answered = self.cycle.response_complete  # the last request that came; others may have come before it
        if self._reading:
            self._answering = False
            self._wait(self.limits.linger_s if answered else self.limits.body_s)
        elif answered:
            self._answering = False
            self._wait(self.limits.idle_s)

    # Time.

    def _wait(self, seconds: float) -> None:
        self._stop_timer()
        self._since = self.loop.time()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        answered = self.cycle is not None and self.cycle.response_started
        if self._reading and not answered:
            self._refuse(ApiError(408, "The request did not arrive in time.", code="timeout"))
        else:
            self._close()

    # Refusals.

    def _stop(self, refusal: ApiError) -> None:
        """Stops the parser from within; `send_400_response` is called when it has returned."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser has given up."""
        self._refuse(self._refusal or ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Says why and closes. In the middle of an answer there is no place to say anything."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = encode(error.openai())
            fields = {
                "content-type": "application/json", "content-length": str(len(body)), "connection": "close",
                **error.headers,
            }  # fmt: skip
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self._close()

    def _close(self) -> None:
        """Ends the connection when the client has heard everything, and soon in any case.

        To close while the client still sends would reset the connection, and the client might not see the error. So
        only the sending half is closed where that can be done, and what comes in is dropped.
        """
        self._refused = True
        self._stop_timer()
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # the handler learns that its client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof() and not self.pipeline:
            self.transport.write_eof()
        else:
            self.transport.close()
        self._timer = self.loop.call_later(_LAST_S, self.transport.abort)


def limited(limits: Limits) -> type[LimitedConnection]:
    """The class with other limits, as uvicorn wants it: it makes the connections itself."""
    return type("Connection", (LimitedConnection,), {"limits": limits})
