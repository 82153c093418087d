"""A request's place in the queue is free again however the request ends, and a body nested too deeply is refused."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from monotape.server.api_error import ApiError
from monotape.server.config import ServerConfig
from monotape.server.engine import wire
from monotape.server.engine.client import EngineFault
from monotape.server.engine.outbox import Outbox
from monotape.server.engine.process import EngineProcess
from monotape.server.grammar.definition import Grammar
from monotape.server.http.bodies import Bodies
from monotape.server.http.endpoint import Answer, Endpoint, Handler, Route, Stream
from monotape.server.service.clock import Clock
from monotape.server.service.failures import as_api_error
from monotape.server.service.metrics import Metrics
from monotape.server.service.service import Service
from monotape.server.service.text_work import TextWork
from server.running import NO_TLS, RunningServer
from server.test_conversation import StillEngine, text
from server.test_gate import received
from waiting import PATIENCE_S

__all__ = ["text"]  # a fixture

HI = [{"role": "user", "content": "say:hi"}]


async def lined_up_and_lost(service: Service, _: Any, scope: Scope) -> Answer:
    with service.lining_up(service.receive(scope["state"], None)[0]):
        pass
    raise ValueError("a mistake between the queue and the answer")


async def lined_up_and_never_streamed(service: Service, _: Any, scope: Scope) -> Answer:
    with service.lining_up(service.receive(scope["state"], None)[0]):
        pass

    async def events() -> Any:
        raise ValueError("a mistake before the first event")
        yield b""

    return Stream(events(), lambda error: b"failed\n\n")


async def answered(service: Service, handler: Handler) -> list[int]:
    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    received = [{"type": "http.request", "body": b""}]

    async def receive() -> Message:
        if received:
            return received.pop()
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "state": {}}
    await Endpoint(service, Route("POST", "/v1/x", handler), Bodies(1024))(scope, receive, send)
    return statuses


@pytest.mark.parametrize(
    ("handler", "status"), [(lined_up_and_lost, 500), (lined_up_and_never_streamed, 200)]
)
def test_a_mistake_after_lining_up_frees_the_place(text: TextWork, handler: Handler, status: int) -> None:
    async def play() -> None:
        engine: Any = StillEngine()
        service = Service(ServerConfig(max_queue=1), ("m",), engine, Metrics())
        service.text = text
        for _ in range(5):
            assert await answered(service, handler) == [status]
            assert (service.gate.running, service.gate.waiting) == (0, 0)

    asyncio.run(play())


def test_a_request_that_never_lined_up_has_nothing_to_leave() -> None:
    Clock().leave()
    error = as_api_error(RecursionError("maximum recursion depth exceeded"), "A request")
    assert isinstance(error, ApiError) and error.status == 400


def nested(depth: int, inside: str = "") -> str:
    return "[" * depth + inside + "]" * depth


#: Bodies of which one value may be anything.
BODIES = [
    ("/v1/responses", '{"input": "say:hi", "metadata": {"a": %s}}'),
    ("/v1/responses", '{"input": "say:hi", "stream": true, "metadata": {"a": %s}}'),
    ("/v1/responses", '{"input": "say:hi", "tools": [{"type": "function", "name": "f", "parameters": {"a": %s}}]}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "say:hi"}], "tools": '
     '[{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "say:hi", "name": %s}], "stream": true}'),
    ("/v1/messages", '{"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 9, "tools": '
     '[{"name": "f", "input_schema": {"a": %s}}]}'),
    ("/v1/completions", '{"prompt": "say:hi", "json_schema": {"a": %s}}'),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_body_that_is_nested_too_deeply_is_refused_and_holds_no_place(
    scripted: RunningServer, path: str, body: str
) -> None:
    """At depths around the one at which the decoder itself gives up, and far beyond it."""
    with httpx.Client(base_url=scripted.url, timeout=PATIENCE_S, verify=NO_TLS) as client:
        for depth in (*range(880, 1000, 7), *range(975, 992), 100_000):
            answer = client.post(path, content=body % nested(depth))
            broken = "response.failed" in answer.text
            assert answer.status_code in (200, 400) and not broken, (depth, answer.text[:200])
        refused = answer.json()["error"]["message"]
    assert refused == "The request is nested too deeply. Use fewer levels of lists and objects."
    assert scripted.metric("vllm:num_requests_running") == scripted.metric("vllm:num_requests_waiting") == 0
    assert scripted.say("say:next") == "next"


class BrokenGrammars:
    """Grammars with a mistake of our own, and one that works."""

    def compile(self, job_id: int, grammar: Grammar) -> None:
        if grammar.text == "broken":
            raise ValueError("a mistake")


def test_a_grammar_that_cannot_be_compiled_for_any_reason_is_answered() -> None:
    here, there = socket.socketpair()
    nothing: Any = None
    grammars: Any = BrokenGrammars()
    with here, there:
        outbox = Outbox(there)
        engine = EngineProcess(nothing, outbox, grammars)
        for job_id, name in enumerate(("broken", "good"), 1):
            engine._begin_compiling(wire.Compile(job_id, Grammar("regex", name)))
        engine._compilers.shutdown()
        outbox.close()
        there.close()
        answers = {message.id: message for message in received(here) if isinstance(message, wire.Compiled)}
    assert answers == {1: wire.Compiled(1, "internal"), 2: wire.Compiled(2)}
    error = as_api_error(EngineFault("internal", ""), "A request")
    assert (error.status, error.code) == (500, "internal_error")
