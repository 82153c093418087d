"""Request bodies, bounded one by one and all together: many large ones at a time would fill the memory."""

from __future__ import annotations

from starlette.types import Receive

from monotape.server.api_error import ApiError

_LARGEST_AT_A_TIME = 8


class ClientLeft(Exception):
    """The connection was closed before the answer was complete."""


class Bodies:
    """The bytes of all requests that are being read or answered."""

    def __init__(self, largest: int) -> None:
        self.largest, self.most, self.held = largest, _LARGEST_AT_A_TIME * largest, 0


class Body:
    """One request's share of them, until it is released."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    async def read(self, receive: Receive) -> bytes:
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            self._take(len(parts[-1]))
            if not message.get("more_body"):
                return b"".join(parts)

    def _take(self, size: int) -> None:
        bodies = self._bodies
        self._size += size
        bodies.held += size
        if self._size > bodies.largest:
            raise ApiError(413, f"The body is larger than {bodies.largest} bytes.", code="request_too_large")
        if bodies.held > bodies.most:
            raise ApiError(
                429, f"The server holds {bodies.most} bytes of requests and can take no more. Try again later.",
                code="rate_limit_exceeded", headers={"retry-after": "1"},
            )  # fmt: skip

    def release(self) -> None:
        self._bodies.held -= self._size
        self._size = 0
