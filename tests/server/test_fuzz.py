"""Nonsense in, an error out, and the next request correct: malformed bodies, headers and chunks, and schemathesis.

`SCHEMATHESIS_EXAMPLES=2000 pytest tests/server/test_fuzz.py` looks for longer.
"""

from __future__ import annotations

import json
import os
import random
import socket
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from server.running import RunningServer
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "60"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "say:x"}], "max_tokens": 4, "temperature": 0.5, "seed": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "stop": ["a"], "stream": False, "logit_bias": {"3": 1.5}, "response_format": {"type": "text"},
    },
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 4, "logprobs": 2, "echo": True, "n": 2},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "say:x"}]}], "max_output_tokens": 4,
        "text": {"format": {"type": "text"}}, "tools": [{"type": "function", "name": "f"}],
    },
    "/v1/messages": {
        "max_tokens": 4, "system": [{"type": "text", "text": "x"}], "tools": [{"name": "f", "input_schema": {}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "say:x"}]}],
    },
    "/tokenize": {"prompt": "x", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 2**63, 1e308, "", "\ud800", "\x00", [], {}, [[]], {"a": {"b": []}}, "x" * 5000, [None], -0.0,
]  # fmt: skip


def mutated(value: Any, dice: random.Random) -> Any:
    """The same with one place changed."""
    if dice.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return dice.choice(ODD)
    if isinstance(value, dict):
        key = dice.choice(list(value))
        changed = {**value, key: mutated(value[key], dice)}
        return {**changed, "x" + key: 1} if dice.random() < 0.1 else changed
    index = dice.randrange(len(value))
    return [*value[:index], mutated(value[index], dice), *value[index + 1 :]]


@pytest.mark.parametrize("path", ROUTES)
def test_mutated_bodies_never_make_a_server_error(scripted: RunningServer, path: str) -> None:
    dice = random.Random(path)
    statuses = set()
    with httpx.Client(timeout=PATIENCE_S) as client:
        for _ in range(120):
            body = json.dumps(mutated(GOOD[path], dice)).encode()
            response = client.post(scripted.url + path, content=body)
            statuses.add(response.status_code)
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"], body
    assert statuses >= {200, 400} or path == "/detokenize"
    assert scripted.say("say:well") == "well"


def test_truncated_and_corrupted_bodies(scripted: RunningServer) -> None:
    dice = random.Random(7)
    whole = json.dumps(GOOD["/v1/chat/completions"]).encode()
    with httpx.Client(timeout=PATIENCE_S) as client:
        for _ in range(150):
            body = bytearray(whole[: dice.randrange(len(whole) + 1)])
            for _ in range(dice.randrange(4)):
                if body:
                    body[dice.randrange(len(body))] = dice.randrange(256)
            response = client.post(scripted.url + "/v1/chat/completions", content=bytes(body))
            assert response.status_code in (200, 400), bytes(body)
    assert scripted.say("say:well") == "well"


RAW = [
    b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: local\x00host\r\n\r\n",
    b"GET /\xff\xfe%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: eA==\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
def test_malformed_http_leaves_the_server_well(scripted: RunningServer, data: bytes) -> None:
    host, port = scripted.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(65536)
        except OSError:
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 5")
    assert scripted.say("say:well") == "well"


def test_schemathesis_finds_no_server_error_and_no_breach_of_the_schema(scripted: RunningServer) -> None:
    """Every answer has a documented status, type and shape, whatever the schema allows to be sent."""
    document = scripted.get("/openapi.json").json()
    operations = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    assert len(operations) == 16
    checks = schemathesis.checks.CHECKS.get_by_names(CHECKS)
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    shares = {
        True: EXAMPLES // (len(ROUTES) * len(modes)) + 1,
        False: 3,
    }  # most routes without a body have one example
    called = 0

    def check(case: Any) -> None:
        nonlocal called
        called += 1
        case.validate_response(case.call(base_url=scripted.url, timeout=PATIENCE_S), checks=checks)

    for operation in operations:
        for mode in modes:
            if operation.body or mode is GenerationMode.POSITIVE:
                chosen = settings(
                    max_examples=shares[bool(operation.body)], deadline=None, database=None, derandomize=True,
                    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                chosen(given(case=operation.as_strategy(generation_mode=mode))(check))()
    assert called >= EXAMPLES
    assert scripted.say("say:well") == "well"
