"""Schemas made to keep a server busy: they are counted, bounded, killed with their client, and delay no others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from server.running import RunningServer, scripted_server
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

ATTACKERS = 8
CHAT = "/v1/chat/completions"
WAITING = "vllm:num_requests_waiting"
SCHEMA = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(16_400)}}
HI = [{"role": "user", "content": "say:hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "/v1/completions": {"prompt": "say:hi", "json_schema": SCHEMA},
    "/v1/responses": {
        "input": "say:hi",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 9,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


@pytest.fixture(scope="module")
def attacked() -> Iterator[RunningServer]:
    with scripted_server(max_queue=ATTACKERS, grammar_timeout=1) as server:
        yield server.wait()


@pytest.fixture(scope="module")
def patient() -> Iterator[RunningServer]:
    """A server that lets a grammar take an hour: only its client's leaving can end it."""
    with scripted_server(max_queue=1, grammar_timeout=3600) as server:
        yield server.wait()


def test_eight_schemas_do_not_hold_up_a_plain_request(attacked: RunningServer) -> None:
    with ThreadPoolExecutor(ATTACKERS) as pool:
        answers = [pool.submit(attacked.post, CHAT, BODIES[CHAT]) for _ in range(ATTACKERS)]
        until(lambda: attacked.metric(WAITING) > 0)
        assert attacked.say("say:plain") == "plain"
        assert not all(answer.done() for answer in answers), "the plain request waited for all schemas"
        responses = [answer.result() for answer in answers]
    for response in responses:
        refused_in_one_sentence(response)
    assert attacked.metric(WAITING) == 0
    assert attacked.metric("monotape_engine_restarts") == 0


@pytest.mark.parametrize("path", list(BODIES))
def test_every_interface_refuses_it(attacked: RunningServer, path: str) -> None:
    refused_in_one_sentence(attacked.post(path, BODIES[path]))
    refused_in_one_sentence(attacked.post(path, {**BODIES[path], "stream": True}))


def refused_in_one_sentence(response: httpx.Response) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "The JSON schema went beyond its limits of time" in error["message"]
    assert "\n" not in error["message"] and "panic" not in error["message"] and len(error["message"]) < 200


def test_a_forced_tool_is_bounded_too(attacked: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    response = attacked.post(CHAT, {"messages": HI, "tools": [tool], "tool_choice": "required"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
    assert "The schema of a tool went beyond its limits" in response.json()["error"]["message"]


def test_it_is_counted_in_the_queue_and_ends_with_its_client(patient: RunningServer) -> None:
    """A schema that would take for ever has a place; when its client leaves, both are free again."""
    first, second = _send(patient, BODIES[CHAT]), _send(patient, BODIES[CHAT])
    until(lambda: patient.metric(WAITING) == 2)
    refused = patient.post(CHAT, {"messages": HI})
    assert refused.status_code == 429 and "retry-after" in refused.headers
    first.close()
    until(lambda: patient.metric(WAITING) == 1)
    assert patient.say("say:free") == "free"
    second.close()
    until(lambda: patient.metric(WAITING) == 0)
    colour = {"structured_outputs": {"choice": ["red", "green"]}}
    with ThreadPoolExecutor(2) as pool:  # both compilers are free again, or these would wait for ever
        said = [pool.submit(patient.say, "say:red", **colour) for _ in range(2)]
        assert [answer.result() for answer in said] == ["red", "red"]


def _send(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read."""
    where = urlsplit(server.url)
    data = msgspec.json.encode(body)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    connection.sendall(head.encode() + data)
    return connection


def test_a_plain_request_runs_while_a_grammar_is_compiled(patient: RunningServer) -> None:
    connection = _send(patient, BODIES[CHAT])
    with connection:
        until(lambda: patient.metric(WAITING) == 1)
        said: list[str] = []
        thread = threading.Thread(target=lambda: said.append(patient.say("say:meanwhile")))
        thread.start()
        thread.join(PATIENCE_S)
        assert said == ["meanwhile"]
        assert patient.metric(WAITING) == 1, "the grammar is still at work"
    until(lambda: patient.metric(WAITING) == 0)
