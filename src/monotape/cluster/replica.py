"""One replica: the routes of the single server and its engine process, asked by the front instead of by a socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from monotape.cluster.forwarded import STARTED, Batch, Forwarded
from monotape.engine.config import EngineConfig
from monotape.errors import BackendUnavailable
from monotape.server.app import routes
from monotape.server.config import ServerConfig
from monotape.server.engine.info import PhaseTime
from monotape.server.run import running_service
from monotape.server.service.clock import Clock
from monotape.server.service.service import RESTART_WAIT_S, Service

FIGURES = "monotape.figures"  # type of the message that brings a replica's metrics


class Replica:
    """A server without a listener. It answers one request at a time; others wait in its queue."""

    def __init__(self, service: Service, stack: contextlib.AsyncExitStack) -> None:
        self._service, self._stack = service, stack
        self._app = routes(service)
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, config: ServerConfig, engine: EngineConfig, source: str) -> Replica:
        """Loads the model; BackendUnavailable says why it cannot be loaded."""
        stack = contextlib.AsyncExitStack()
        loaded = asyncio.Event()
        service = await stack.enter_async_context(
            running_service(config, engine, source, lambda _: loaded.set())
        )
        ready, failed = (
            asyncio.ensure_future(loaded.wait()),
            asyncio.ensure_future(service.engine.failed.wait()),
        )
        await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        failed.cancel()
        if service.engine.failure is not None:
            await stack.aclose()
            raise BackendUnavailable(service.engine.failure)
        return cls(service, stack)

    async def close(self) -> None:
        await self._stack.aclose()

    def check(self) -> None:
        """An error once its engine will not come back."""
        if self._service.engine.failure is not None:
            raise BackendUnavailable(self._service.engine.failure)

    async def answer(self, request: Forwarded) -> AsyncGenerator[Batch, None]:
        """The messages of one answer, several at a time where they come faster than they are taken. Closing it early
        is to the routes what a client that leaves is to the single server.
        """
        await self._engine_is_back()
        exchange = _Exchange(self, request)
        work = asyncio.ensure_future(self._app(exchange.scope, exchange.receive, exchange.send))
        work.add_done_callback(lambda _: exchange.put(None))
        try:
            while batch := await exchange.take():
                yield batch
            await work
        finally:
            exchange.gone.set()
            await _to_the_end(work)

    @property
    def startup(self) -> list[PhaseTime]:
        """The phases of its last start."""
        return self._service.engine.startup

    def figures(self) -> Message:
        samples = self._service.metrics.samples()
        return {"type": FIGURES, "replica": self._name, "number": next(self._numbers), "samples": samples}

    async def _engine_is_back(self) -> None:
        """A request that comes while the engine is being restarted waits as those do that came before."""
        engine = self._service.engine
        if engine.restarts and not engine.ready.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.ready.wait(), RESTART_WAIT_S)


class _Exchange:
    """The two ends of one request for the routes, and what they have sent."""

    def __init__(self, replica: Replica, request: Forwarded) -> None:
        self._replica, self._request = replica, request
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self._body_given = self._ended = False
        self.gone = asyncio.Event()
        self.scope = request.scope()
        self.scope["state"]["clock"] = Clock(on_start=lambda: self.put(STARTED))

    def put(self, message: Message | str | None) -> None:
        self._sent.put_nowait(message)

    async def receive(self) -> Message:
        if not self._body_given:
            self._body_given = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._request.method == "POST" and not message.get("more_body", True):
            self.put(self._replica.figures())  # before the end: its client may ask for them next
        self.put(message)

    async def take(self) -> Batch:
        """What has been sent since; nothing once all has been taken."""
        if self._ended:
            return []
        batch = [await self._sent.get()]
        while not self._sent.empty():
            batch.append(self._sent.get_nowait())
        self._ended = batch[-1] is None
        return batch[:-1] if self._ended else batch


async def _to_the_end(work: asyncio.Future[None]) -> None:
    """The engine must be free before the replica counts as free, even if this call is being cancelled."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({work})
    if not work.cancelled():
        work.exception()
