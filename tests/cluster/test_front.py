"""The front between clients and scripted replicas: what it lets through, and what it says for a dead one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from monotape.cluster.forwarded import STARTED, Batch, Forwarded
from monotape.cluster.front import Front, ReplicaLost
from monotape.server.config import ServerConfig
from monotape.server.http.endpoint import PING
from waiting import PATIENCE_S

STREAM = [
    {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
]
WHOLE = [
    {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]},
    {"type": "http.response.body", "body": b'{"ok":1}', "more_body": False},
]
CHAT = "/v1/chat/completions"


def part(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Scripted:
    """Replicas that answer with the batches of one script after another. None: it dies; ...: it hangs."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.asked: list[Forwarded] = []
        self.cancelled = 0

    def answer(self, request: Forwarded) -> Scripted:
        self.asked.append(request)
        return self

    async def __aiter__(self) -> AsyncIterator[Batch]:
        for batch in self.scripts.pop(0):
            if batch is None:
                raise ReplicaLost
            if batch is ...:
                await asyncio.sleep(60)
            yield batch

    def cancel(self) -> None:
        self.cancelled += 1


def asked(
    replicas: Scripted, path: str = CHAT, key: str | None = None, method: str = "POST", **config: Any
) -> httpx.Response:
    """The front's answer to one request."""

    async def run() -> httpx.Response:
        front = Front(ServerConfig(**config), replicas)
        transport = httpx.ASGITransport(front.app)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json={}, headers=headers)

    return asyncio.run(run())


def test_an_answer_passes() -> None:
    replicas = Scripted([[STARTED], WHOLE])
    assert asked(replicas).json() == {"ok": 1}
    assert replicas.asked[0].path == CHAT and replicas.cancelled == 0


@pytest.mark.parametrize("key", [None, "wrong", "secre", "secrets"])
def test_a_wrong_key_reaches_no_replica(key: str | None) -> None:
    replicas = Scripted([WHOLE])
    for path in (CHAT, "/metrics", "/v1/models", "/", "/monotape/info"):
        assert asked(replicas, path, key, api_key="secret").status_code == 401
    assert replicas.asked == []
    assert asked(replicas, CHAT, "secret", api_key="secret").status_code == 200


def test_a_large_body_and_a_wrong_host_reach_no_replica() -> None:
    replicas = Scripted()
    assert asked(replicas, "http://evil.example/v1/models").status_code == 403
    front = Front(ServerConfig(max_body_bytes=1024), replicas)

    async def run() -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(front.app), base_url="http://localhost"
        ) as client:
            return (await client.post(CHAT, content=b"x" * 1025)).status_code

    assert asyncio.run(run()) == 413
    assert replicas.asked == []


@pytest.mark.parametrize("deaths", [1, 4])
def test_a_request_that_waited_where_a_replica_died_is_answered_by_another(deaths: int) -> None:
    replicas = Scripted(*[[None]] * deaths, [[STARTED], WHOLE])
    assert asked(replicas).json() == {"ok": 1}
    assert len(replicas.asked) == deaths + 1


def test_a_stream_that_waited_where_a_replica_died_begins_once() -> None:
    """Its head and a comment may have been sent by then, but no event."""
    first = [*STREAM, part(b"data: dead\n\n"), part(PING)]
    second = [*STREAM, part(b"data: 1\n\n"), STARTED, part(b"data: 2\n\n"), part(b"", more=False)]
    answer = asked(Scripted([first, None], [second]))
    assert answer.status_code == 200
    assert answer.text == PING.decode() + "data: 1\n\ndata: 2\n\n"


def test_a_request_that_kills_every_replica_is_not_sent_round_for_ever() -> None:
    replicas = Scripted(*[[None]] * 99)
    assert asked(replicas).status_code == 503
    assert len(replicas.asked) == 5


def test_the_request_that_ran_ends_with_an_error_object() -> None:
    answer = asked(Scripted([[STARTED], None], [WHOLE]))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert answer.headers["retry-after"] == "1"


def test_an_answer_whose_head_alone_had_come_is_an_error_with_its_own_head() -> None:
    assert asked(Scripted([[STARTED], WHOLE[:1], None])).status_code == 503


def openai_error(text: str) -> dict[str, Any]:
    assert text.endswith("data: [DONE]\n\n")
    found: dict[str, Any] = json.loads(text.split("\n\n")[1].removeprefix("data: "))["error"]
    return found


def anthropic_error(text: str) -> dict[str, Any]:
    event, data = text.strip().split("\n\n")[1].split("\n")
    assert event == "event: error"
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert found["type"] == "error" and found["error"]["type"] == "overloaded_error"
    return found["error"]


def responses_error(text: str) -> dict[str, Any]:
    event, data = text.strip().split("\n\n")[1].split("\n")
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert event == "event: error" and found["type"] == "error"
    assert found["sequence_number"] == 8
    return found


@pytest.mark.parametrize(
    ("path", "read"),
    [
        (CHAT, openai_error), ("/v1/completions", openai_error), ("/v1/messages", anthropic_error),
        ("/v1/responses", responses_error),
    ],
)  # fmt: skip
def test_a_stream_that_was_cut_says_so_in_its_own_words(
    path: str, read: Callable[[str], dict[str, Any]]
) -> None:
    begun = part(b'data: {"type":"x","sequence_number":7}\n\n')
    answer = asked(Scripted([[STARTED], [*STREAM, begun], None]), path)
    assert answer.status_code == 200
    assert "gone" in read(answer.text)["message"]


def test_a_client_that_leaves_frees_its_replica() -> None:
    replicas = Scripted([[STARTED], [*STREAM, part(b"data: 1\n\n")], ...])

    async def run() -> None:
        front = Front(ServerConfig(), replicas)
        left = asyncio.Event()
        given = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> dict[str, Any]:
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                left.set()

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": [(b"host", b"localhost")]
        }  # fmt: skip
        await asyncio.wait_for(front.app(scope, receive, send), PATIENCE_S)

    asyncio.run(run())
    assert replicas.cancelled == 1


def test_an_address_without_a_replica_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monotape.cluster.front.HEALTH_S", 0.05)
    assert asked(Scripted([...]), "/health", method="GET").status_code == 503
