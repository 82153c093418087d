"""Endpoints: a body is read and checked, a handler answers, and a client that leaves cancels its request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from monotape.server.api_error import ApiError, from_validation, too_deep
from monotape.server.http.access_log import note_error, printable
from monotape.server.http.bodies import Bodies, Body
from monotape.server.http.leaving import attend
from monotape.server.http.replies import send_body, send_json, send_part
from monotape.server.service.clock import Clock
from monotape.server.service.failures import as_api_error
from monotape.server.service.service import Service

PING_S = 10.0
PING = b": ping\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer in server-sent events. `failure` makes the event that ends it when something goes wrong."""

    events: AsyncGenerator[bytes, None]
    failure: Callable[[ApiError], bytes]


@dataclass(frozen=True, slots=True)
class Plain:
    """An answer that is not JSON."""

    body: bytes
    content_type: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


Answer = dict[str, Any] | Stream | Plain
Handler = Callable[[Service, Any, Scope], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Route:
    """One route: the type of its body, what else refuses one, and the fields that are read for that."""

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    refuse: Callable[[Any], None] | None = None
    wide: type[msgspec.Struct] | None = None  # the body with the fields that `refuse` looks at


class Endpoint:
    """One route as an ASGI application."""

    def __init__(self, service: Service, route: Route, bodies: Bodies) -> None:
        self._service, self._route, self._bodies = service, route, bodies
        read = route.wide or route.body
        self._decoder: msgspec.json.Decoder[Any] | None = None if read is None else msgspec.json.Decoder(read)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work(body: Body) -> Coroutine[Any, Any, None]:
            request = None if self._decoder is None else self._decoded(await body.read(receive))
            return self._answer(request, scope, send)

        service = self._service
        await attend(
            scope, receive, send, bodies=self._bodies, metrics=service.metrics, closing=service.closing, work=work
        )  # fmt: skip

    def _decoded(self, body: bytes) -> Any:
        assert self._decoder is not None
        try:
            request = self._decoder.decode(body)
            if self._route.refuse is not None:
                self._route.refuse(request)
            return request
        except msgspec.ValidationError as error:
            raise from_validation(str(error)) from None
        except RecursionError:
            raise too_deep() from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ApiError(400, f"The body is not JSON: {error}.", code="invalid_json") from None

    async def _answer(self, request: Any, scope: Scope, send: Send) -> None:
        try:
            answer = await self._route.handler(self._service, request, scope)
            if isinstance(answer, Stream):
                await self._send_stream(send, answer, scope)
            elif isinstance(answer, Plain):
                await send_body(send, 200, answer.body, answer.content_type, answer.headers)
            else:
                await send_json(send, 200, answer)
        except asyncio.CancelledError:
            if self._service.closing.is_set():
                raise _closing() from None
            raise
        except Exception as error:
            raise as_api_error(error, f"A request to {printable(scope['path'])}") from None
        finally:
            clock: Clock | None = scope["state"].get("clock")
            if clock is not None:
                clock.leave()

    async def _send_stream(self, send: Send, stream: Stream, scope: Scope) -> None:
        """Sends events as they come, and a comment when nothing has come for a while."""

        async def fail(error: ApiError) -> None:
            note_error(scope, error)
            await send_part(send, stream.failure(error))

        pause = Pause()
        async with contextlib.aclosing(stream.events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            pings = asyncio.ensure_future(_ping(send, pause))
            try:
                async for event in events:
                    await send_part(send, event)
                    pause.broken = True
            except asyncio.CancelledError:
                if not self._service.closing.is_set():
                    raise
                await fail(_closing())
            except Exception as error:
                await fail(as_api_error(error, "A stream"))
            finally:
                pings.cancel()
            await send_part(send, b"", more=False)


def _closing() -> ApiError:
    return ApiError(
        503, "The server is being shut down before this answer is complete. Ask again in a moment.",
        code="server_shutdown", headers={"retry-after": "5"},
    )  # fmt: skip


@dataclass(slots=True)
class Pause:
    """Whether anything was sent since the last look."""

    broken: bool = False


async def _ping(send: Send, pause: Pause) -> None:
    while True:
        await asyncio.sleep(PING_S)
        if not pause.broken:
            await send_part(send, PING)
        pause.broken = False
