"""Endpoints: a body is read and checked, a handler answers, and a client that leaves cancels what was done for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from monotape.errors import RequestError
from monotape.server.api_error import ApiError, from_engine_error, from_validation
from monotape.server.engine.client import EngineFault
from monotape.server.http.access_log import note_error, printable
from monotape.server.http.bodies import Body, ClientLeft
from monotape.server.http.dialect import Dialect, dialect_of
from monotape.server.requests.fields import Unserved
from monotape.server.service.gate import Turn
from monotape.server.service.service import Service, api_error

LOG = logging.getLogger("monotape.server")
PING_S = 10.0
PING = b": ping\n\n"
_encoder = msgspec.json.Encoder()
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer in server-sent events. `failure` makes the event that ends it when something goes wrong.

    The turn is left even if the client is gone before the first event was asked for.
    """

    events: AsyncGenerator[bytes, None]
    failure: Callable[[ApiError], bytes]
    turn: Turn


@dataclass(frozen=True, slots=True)
class Plain:
    """An answer that is not JSON."""

    body: bytes
    content_type: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


Answer = dict[str, Any] | Stream | Plain
Handler = Callable[[Service, Any, Scope], Awaitable[Answer]]


class Endpoint:
    """One route as an ASGI application."""

    def __init__(
        self,
        service: Service,
        handler: Handler,
        body: type | None = None,
        unserved: Unserved | None = None,
    ) -> None:
        self._service, self._handler, self._unserved = service, handler, unserved
        self._decoder: msgspec.json.Decoder[Any] | None = None if body is None else msgspec.json.Decoder(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(self._service.bodies)
        try:
            request = None if self._decoder is None else self._decoded(await body.read(receive))
            await self._unless_client_leaves(receive, self._answer(request, scope, send))
        except ClientLeft:
            self._service.metrics.cancelled.inc()
            scope["state"]["left"] = True
        except ApiError as error:
            note_error(scope, error)
            await send_error(send, error, dialect_of(scope))
        finally:
            body.release()

    def _decoded(self, body: bytes) -> Any:
        assert self._decoder is not None
        try:
            request = self._decoder.decode(body)
            if self._unserved is not None:
                self._unserved.check(body)
            return request
        except msgspec.ValidationError as error:
            raise from_validation(str(error)) from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ApiError(400, f"The body is not JSON: {error}.", code="invalid_json") from None

    async def _answer(self, request: Any, scope: Scope, send: Send) -> None:
        try:
            answer = await self._handler(self._service, request, scope)
            if isinstance(answer, Stream):
                try:
                    await self._send_stream(send, answer, scope)
                finally:
                    answer.turn.leave()
            elif isinstance(answer, Plain):
                await send_body(send, 200, answer.body, answer.content_type, answer.headers)
            else:
                await send_json(send, 200, answer)
        except RequestError as error:
            raise from_engine_error(error) from None
        except EngineFault as error:
            raise api_error(error) from None
        except ApiError:
            raise
        except asyncio.CancelledError:
            if self._service.closing.is_set():
                raise _closing() from None
            raise
        except Exception:
            LOG.exception("A request to %s failed.", printable(scope["path"]))
            raise ApiError(
                500, "The server made a mistake; its log says which.", code="internal_error"
            ) from None

    async def _unless_client_leaves(self, receive: Receive, work: Any) -> None:
        """Does the work. Cancels it when the connection closes, or when the server must end before it is done."""
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(receive))
        closing = asyncio.ensure_future(self._service.closing.wait())
        try:
            await asyncio.wait({task, watcher, closing}, return_when=asyncio.FIRST_COMPLETED)
            if closing.done() and not task.done() and not watcher.done():
                task.cancel()  # it says so to its client, which may take a moment
                await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ApiError):
                    await task
                raise ClientLeft
            await task
        finally:
            for unfinished in (task, watcher, closing):
                unfinished.cancel()

    async def _send_stream(self, send: Send, stream: Stream, scope: Scope) -> None:
        """Sends events as they come, and a comment when nothing has come for a while."""

        async def fail(error: ApiError) -> None:
            note_error(scope, error)
            await send({"type": "http.response.body", "body": stream.failure(error), "more_body": True})

        pause = Pause()
        async with contextlib.aclosing(stream.events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            pings = asyncio.ensure_future(_ping(send, pause))
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    pause.broken = True
            except (ApiError, EngineFault, RequestError) as error:
                await fail(_as_api(error))
            except asyncio.CancelledError:
                if not self._service.closing.is_set():
                    raise
                await fail(_closing())
            except Exception:
                LOG.exception("A stream failed.")
                await fail(
                    ApiError(500, "The server made a mistake; its log says which.", code="internal_error")
                )
            finally:
                pings.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _closing() -> ApiError:
    return ApiError(
        503, "The server is being shut down before this answer is complete. Ask again in a moment.",
        code="server_shutdown", headers={"retry-after": "5"},
    )  # fmt: skip


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_api(error: ApiError | EngineFault | RequestError) -> ApiError:
    if isinstance(error, EngineFault):
        return api_error(error)
    return from_engine_error(error) if isinstance(error, RequestError) else error


@dataclass(slots=True)
class Pause:
    """Whether anything was sent since the last look."""

    broken: bool = False


async def _ping(send: Send, pause: Pause) -> None:
    while True:
        await asyncio.sleep(PING_S)
        if not pause.broken:
            await send({"type": "http.response.body", "body": PING, "more_body": True})
        pause.broken = False


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


def encode(data: Any) -> bytes:
    """JSON; text that is not valid Unicode is mended rather than refused."""
    try:
        return _encoder.encode(data)
    except UnicodeEncodeError:
        return _encoder.encode(_mended(data))


def _mended(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "replace").decode()
    if isinstance(data, dict):
        return {_mended(key): _mended(value) for key, value in data.items()}
    return [_mended(item) for item in data] if isinstance(data, list) else data


async def send_json(
    send: Send, status: int, data: Any, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    await send_body(send, status, encode(data), "application/json", headers)


async def send_error(send: Send, error: ApiError, dialect: Dialect) -> None:
    headers = tuple((name.encode(), value.encode()) for name, value in error.headers.items())
    await send_json(send, error.status, error.openai() if dialect == "openai" else error.anthropic(), headers)


async def send_body(
    send: Send, status: int, body: bytes, content_type: str, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers
        ],
    }  # fmt: skip
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
