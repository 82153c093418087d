"""A client that leaves cancels its request, and the bytes of its body are given back however it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from monotape.server.api_error import ApiError
from monotape.server.http.access_log import note_error
from monotape.server.http.bodies import Bodies, Body, ClientLeft
from monotape.server.http.dialect import dialect_of
from monotape.server.http.replies import send_error
from monotape.server.service.metrics import Metrics


async def attend(
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    bodies: Bodies,
    metrics: Metrics,
    closing: asyncio.Event,
    work: Callable[[Body], Awaitable[Coroutine[Any, Any, None]]],
) -> None:
    """Answers one request. `work` reads its body, as far as it needs it, and gives what is to be done then."""
    body = Body(bodies)
    try:
        await unless_client_leaves(receive, await work(body), closing)
    except ClientLeft:
        metrics.cancelled.inc()
        scope["state"]["left"] = True
    except ApiError as error:
        note_error(scope, error)
        await send_error(send, error, dialect_of(scope))
    finally:
        body.release()


async def unless_client_leaves(receive: Receive, work: Any, closing: asyncio.Event) -> None:
    """Does the work. Cancels it when the connection closes, or when the server must end before it is done."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    ending = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait({task, watcher, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done() and not task.done() and not watcher.done():
            task.cancel()  # it says so to its client, which may take a moment
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task
            raise ClientLeft
        await task
    finally:
        for unfinished in (task, watcher, ending):
            unfinished.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
