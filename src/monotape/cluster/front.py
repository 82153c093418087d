"""The ASGI application behind Ray's proxies: checks access, has a replica answer, and speaks for one that has died."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from monotape.cluster.figures import Figures
from monotape.cluster.forwarded import STARTED, Batch, Forwarded
from monotape.cluster.replica import FIGURES
from monotape.cluster.units import units_of
from monotape.server.api_error import ApiError
from monotape.server.apis.broken_streams import broken
from monotape.server.app import behind_checks
from monotape.server.config import ServerConfig
from monotape.server.http.access_log import note_error, printable
from monotape.server.http.bodies import Bodies, Body
from monotape.server.http.endpoint import PING
from monotape.server.http.leaving import attend
from monotape.server.http.replies import send_body, send_part
from monotape.server.service.failures import as_api_error
from monotape.server.service.metrics import CONTENT_TYPE, Metrics

HEALTH_S = 5.0  # within which a replica must answer for the address to be healthy
_ATTEMPTS = 5  # replicas that may die under a request before it was begun
_SEQUENCE = re.compile(rb'"sequence_number":(\d+)')


class ReplicaLost(Exception):
    """The replica that had a request is gone."""


class Answering(Protocol):
    """The batches of one answer. `cancel` frees its replica."""

    def __aiter__(self) -> AsyncIterator[Batch]: ...
    def cancel(self) -> None: ...


class Replicas(Protocol):
    """The replicas as the front sees them; application.py implements it with a handle of Ray Serve."""

    def answer(self, request: Forwarded) -> Answering:
        """Has one of them answer. Iterating raises ReplicaLost if it dies, and ApiError if none can be had."""
        ...


class Front:
    """One address for all replicas."""

    def __init__(self, config: ServerConfig, replicas: Replicas) -> None:
        self._replicas = replicas
        self._bodies, self._figures, self._metrics = Bodies(config.max_body_bytes), Figures(), Metrics()
        self._passing: set[Passing] = set()
        self._metrics.watch(
            running=lambda: sum(passing.started for passing in self._passing),
            waiting=lambda: sum(not passing.started for passing in self._passing),
            restarts=lambda: 0,
        )
        self._never = asyncio.Event()
        self.app = behind_checks(self._answer, config, self._metrics)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work(body: Body) -> Coroutine[Any, Any, None]:
            return self._work(_forwarded(scope, await body.read(receive)), scope, send)

        await attend(
            scope, receive, send, bodies=self._bodies, metrics=self._metrics, closing=self._never, work=work
        )  # fmt: skip

    async def _work(self, request: Forwarded, scope: Scope, send: Send) -> None:
        if request.path == "/metrics" and request.method == "GET":
            return await send_body(send, 200, self._figures.text(self._metrics), CONTENT_TYPE)
        passing = Passing(request, send, self._figures)
        if request.method == "POST":
            self._passing.add(passing)
        try:
            limit_s = HEALTH_S if request.path == "/health" else None
            await asyncio.wait_for(self._pass(passing), limit_s)
        except TimeoutError:
            raise _none_ready() from None
        except Exception as error:
            failure = as_api_error(error, f"A request to {printable(scope['path'])}")
            if not passing.begun:
                raise failure from None
            note_error(scope, failure)
            await passing.break_off(failure)
        finally:
            self._passing.discard(passing)

    async def _pass(self, passing: Passing) -> None:
        """A replica that dies takes the request that it runs with it. One that waited there goes to another."""
        for _ in range(_ATTEMPTS):
            try:
                return await passing.through(self._replicas.answer(passing.request))
            except ReplicaLost:
                if passing.started:
                    break
        raise ApiError(
            503, "The replica that answered this request is gone. Ask again: another one will answer.",
            code="engine_unavailable", headers={"retry-after": "1"},
        )  # fmt: skip


class Passing:
    """One answer on its way from a replica to its client.

    A stream begins before the engine does. Until then its events are held back, so that another replica can begin anew
    if this one dies; only the comments that keep the connection open pass.
    """

    def __init__(self, request: Forwarded, send: Send, figures: Figures) -> None:
        self.request, self._send, self._figures = request, send, figures
        self.started = False  # the engine has begun
        self.begun = False  # the client has seen the head of an answer
        self._head: Message | None = None
        self._held: list[Message] = []
        self._streams = False
        self._sequence = 0

    async def through(self, answering: Answering) -> None:
        ended = False
        self._head, self._held = None, []
        try:
            async for batch in answering:
                for message in batch:
                    await self._take(message)
            ended = True
        finally:
            if not ended:
                answering.cancel()

    async def _take(self, message: Any) -> None:
        if message == STARTED:
            self.started = True
            await self._release()
        elif message["type"] == FIGURES:
            self._figures.put(message["replica"], message["number"], message["samples"])
        elif message["type"] == "http.response.start":
            self._head = (
                message  # sent with the first part of the body: a whole answer comes all or not at all
            )
            self._streams = _is_stream(message)
        elif not message.get("more_body") or self.started:
            await self._release()
            await self._body(message)
        elif message["body"] == PING:
            await self._body(message)
        else:
            self._held.append(message)

    async def _release(self) -> None:
        held, self._held = self._held, []
        for message in held:
            await self._body(message)

    async def _body(self, message: Message) -> None:
        if not self.begun and self._head is not None:
            self.begun = True
            await self._send(self._head)
        if self._streams and (found := _SEQUENCE.findall(message["body"])):
            self._sequence = int(found[-1]) + 1
        await self._send(message)

    async def break_off(self, error: ApiError) -> None:
        """Ends an answer of which the client has seen a part."""
        assert self._streams, "an answer in one part has no middle"
        await send_part(self._send, broken(self.request.path, error, self._sequence))
        await send_part(self._send, b"", more=False)


def _is_stream(head: Message) -> bool:
    return any(name == b"content-type" and b"event-stream" in value for name, value in head["headers"])


def _none_ready() -> ApiError:
    return ApiError(
        503, "No replica is ready. Try again in a moment.", code="engine_unavailable",
        headers={"retry-after": "1"},
    )  # fmt: skip


def _forwarded(scope: Scope, body: bytes) -> Forwarded:
    return Forwarded(
        scope["method"], scope["path"], scope["query_string"],
        tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        body, scope["state"]["request_id"], units_of(scope["path"], body),
    )  # fmt: skip
