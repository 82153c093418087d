"""Clients that send without end, or not at all: before any key is checked, memory and connections are bounded."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from processes import need_proc
from server.running import RunningServer, scripted_server
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

KEY = "correct-horse"
MOST_SENT = 64 << 20  # bytes that an attack of these tests may send
ROOM = 40 << 20  # bytes by which the server may grow; the attacks send more
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
#: What comes before the part that is repeated, and that part.
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "header lines": (HEAD, b"X-Filler: " + b"a" * 500 + b"\r\n"),
    "short header lines": (HEAD, b"a:b\r\n" * 100),
    "one header": (HEAD + b"X-Filler: ", b"a" * 1000),
    "the name of a header": (HEAD, b"a" * 1000),
    "a path": (b"GET /", b"a" * 1000),
    "empty lines": (b"", b"\r\n" * 500),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"X-Filler: " + b"a" * 500 + b"\r\n"),
    "one trailer": (CHUNKED + b"1\r\n{\r\n0\r\nX-Filler: ", b"a" * 1000),
    "a chunk's extension": (CHUNKED + b"1;", b"a" * 1000),
    "pipelined requests": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500),
}


def rss(server: RunningServer) -> int:
    need_proc()
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def connect(server: RunningServer, data: bytes = b"") -> socket.socket:
    """A connection on which this has been sent."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    client.sendall(data)
    return client


def answered(clients: list[socket.socket]) -> list[socket.socket]:
    """Those for which the server has sent something, or which it has closed."""
    return select.select(clients, [], [], 0)[0]


def rest(client: socket.socket) -> bytes:
    """What the server still says; it must close the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := client.recv(1 << 16):
            received += more
    return received


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    """The limits that users get, with a key that no attack has."""
    with scripted_server(api_key=KEY) as server:
        yield server.wait()


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningServer]:
    """Two seconds for everything: requests that are whole take a hundredth of them."""
    limits = {"head_s": 2, "body_s": 2, "linger_s": 2, "idle_s": 4, "stall_s": 2}
    with scripted_server(limits=limits) as server:
        yield server.wait()


@pytest.mark.parametrize("what", ENDLESS)
def test_a_request_without_end_is_cut_and_costs_no_memory(guarded: RunningServer, what: str) -> None:
    before, (start, repeated) = rss(guarded), ENDLESS[what]
    sent = 0
    with connect(guarded) as client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        client.sendall(start)
        while sent < MOST_SENT:
            client.sendall(repeated)
            sent += len(repeated)
    assert sent < MOST_SENT, "the server took it all"
    assert rss(guarded) - before < ROOM
    assert guarded.get("/health").status_code == 200


def test_headers_that_are_too_large_are_said_to_be(guarded: RunningServer) -> None:
    for headers in ({"x-filler": "a" * 40_000}, {f"x-{number}": "a" for number in range(200)}):
        refused = guarded.get("/health", headers=headers)
        assert refused.status_code == 431 and refused.json()["error"]["code"] == "headers_too_large"
    assert guarded.get("/health", headers={"x-filler": "a" * 30_000}).status_code == 200


def test_many_attackers_at_once_cost_no_memory(guarded: RunningServer) -> None:
    """Every one stays just below the limits of its headers."""
    before = rss(guarded)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(guarded)) for _ in range(400)]
        for client in clients:
            client.sendall(HEAD + b"X-Filler: " + b"a" * 30_000)
        assert guarded.get("/health").status_code == 200
        assert rss(guarded) - before < ROOM


def test_idle_and_half_finished_connections_are_closed(hasty: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(hasty)) for _ in range(300)]
        half = [stack.enter_context(connect(hasty, HEAD)) for _ in range(100)]
        assert hasty.get("/health").status_code == 200
        assert {rest(client) for client in idle} == {b""}
        for client in half:
            assert rest(client).startswith(b"HTTP/1.1 408 ")
    assert hasty.say("say:still here") == "still here"


def test_headers_and_bodies_that_drip_are_cut(hasty: RunningServer) -> None:
    """All of them at a time: each takes as long as it is allowed to."""
    announced = "HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    paths = ("/v1/chat/completions", "/health", "/nowhere")
    drips = {HEAD: b"X-Drip: a\r\n"} | {f"POST {path} {announced}".encode(): b" " for path in paths}
    with ThreadPoolExecutor(len(drips)) as pool:
        assert all(pool.map(lambda start: is_cut(hasty, start, drips[start]), drips))


def is_cut(server: RunningServer, start: bytes, drip: bytes) -> bool:
    """Whether the server ends a connection on which a little comes again and again."""
    deadline = time.monotonic() + PATIENCE_S
    with connect(server, start) as client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while time.monotonic() < deadline:
            client.sendall(drip)
            time.sleep(0.1)
        return False
    return True


def test_a_connection_between_requests_is_closed_at_last(hasty: RunningServer) -> None:
    """Also when a byte of the next request has come, or the body after its refusal."""
    late = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
    requests = {b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n": b"G", late: b"{}"}
    with contextlib.ExitStack() as stack:
        clients = {stack.enter_context(connect(hasty, request)): later for request, later in requests.items()}
        for client, later in clients.items():
            assert client.recv(4096).startswith(b"HTTP/1.1 ")
            client.sendall(later)
        for client in clients:
            rest(client)


def test_limits_do_not_touch_those_who_wait_for_answers(hasty: RunningServer) -> None:
    """An answer that takes longer than all of them, a pause between two requests, and a request in two parts."""
    slow, body = (
        json.dumps({"messages": [{"role": "user", "content": f"{speed}say:{'abcd' * 8}"}]})
        for speed in ("prefill=2500 rate=20 ", "")
    )
    with httpx.Client(base_url=hasty.url, timeout=PATIENCE_S) as client:
        for asked in (slow, body):
            answer = client.post("/v1/chat/completions", content=asked)
            assert answer.json()["choices"][0]["message"]["content"] == "abcd" * 8
            time.sleep(1.5 if asked is slow else 0)
    with connect(hasty) as bare:
        head = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        for part in (HEAD[:20], HEAD[20:] + head + body[:9].encode(), body[9:].encode()):
            bare.sendall(part)
            time.sleep(0.1)
        assert b"abcdabcd" in rest(bare)


def test_a_client_that_does_not_read_is_cut(hasty: RunningServer) -> None:
    """Its answer is larger than all buffers on the way, and the engine would wait for it."""
    body = {"messages": [{"role": "user", "content": "repeat=9000 say:x "}], "stream": True,
            "logprobs": True, "top_logprobs": 20}  # fmt: skip
    data = json.dumps(body).encode()
    with connect(hasty) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: hasty.metric("vllm:num_requests_running") == 1)
        until(lambda: hasty.metric("vllm:num_requests_running") == 0)
        assert hasty.say("say:next") == "next"


def test_idle_connections_give_way_and_busy_ones_do_not() -> None:
    with scripted_server(limits={"connections": 8}, max_queue=16) as server, contextlib.ExitStack() as stack:
        server.wait()
        idle = [stack.enter_context(connect(server)) for _ in range(40)]
        assert server.get("/health").status_code == 200
        for client in idle[:32]:
            assert rest(client) == b""
        question = [{"role": "user", "content": "rate=20 repeat=9000 say:x "}]
        body = json.dumps({"messages": question, "stream": True})
        head = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode()
        busy = [stack.enter_context(connect(server)) for _ in range(8)]
        for client in busy:
            client.sendall(head + body.encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")  # its turn need not have come
        for _ in range(3):
            refused = _answer(server)
            assert b"too_many_connections" in refused and b"retry-after: 1" in refused
        busy[0].close()
        until(lambda: b"HTTP/1.1 200 " in _answer(server))


def _answer(server: RunningServer) -> bytes:
    with connect(server) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return rest(client)
    return b""


def test_bodies_are_bounded_all_together() -> None:
    """Each is allowed; all of them would be 24 MB."""
    size = 1_000_000
    with scripted_server(max_body_bytes=size) as server, contextlib.ExitStack() as stack:
        before = rss(server.wait())
        clients = [stack.enter_context(connect(server)) for _ in range(24)]
        for client in clients:
            client.sendall(HEAD + f"Content-Length: {size}\r\n\r\n".encode() + b" " * (size - 1))
        until(lambda: len(answered(clients)) >= 24 - 8)
        assert all(client.recv(4096).startswith(b"HTTP/1.1 429 ") for client in answered(clients))
        assert rss(server) - before < ROOM
        stack.close()
        until(lambda: server.post("/v1/chat/completions", {"messages": []}).status_code == 400)
