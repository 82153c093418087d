"""A client that leaves cancels its request."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.types import Receive

from monotape.server.api_error import ApiError
from monotape.server.http.bodies import ClientLeft


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
