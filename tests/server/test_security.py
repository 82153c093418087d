"""Access: addresses, keys, Host and Origin, and the limits of requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from monotape.errors import UsageError
from monotape.server.config import ServerConfig
from server.running import RunningServer, scripted_server
from waiting import PATIENCE_S

KEY = "correct-horse"


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with scripted_server(
        api_key=KEY,
        allowed_origins=["https://app.example", "https://Other.Example/"],
        allowed_hosts=["Proxy.Example"],
        trust_request_chat_template=True,
        max_body_bytes=5000,
    ) as server:
        yield server.wait()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="would let anybody"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, api_key="k").host == host


@pytest.mark.parametrize(
    "settings",
    [{"port": 70_000}, {"max_queue": -1}, {"api_key": " "}, {"stream_interval": 0}, {"ssl_keyfile": "k"},
     {"tool_call_parser": "magic"}, {"reasoning_parser": "magic"}, {"max_body_bytes": 3}, {"engine_timeout": 0},
     {"max_connections": 20, "max_queue": 16}, {"max_connections": 0}, {"max_connections": 200_000},
     {"grammar_timeout": 0}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerConfig(**settings)


def test_every_request_that_may_wait_has_a_connection() -> None:
    assert ServerConfig().connections == 512
    assert ServerConfig(max_queue=5000).connections > 5000
    assert ServerConfig(max_queue=5000, max_connections=6000).connections == 6000


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/models", "/v1/models/scripted", "/metrics", "/version", "/monotape/info", "/openapi.json", "/nowhere",
     "//health", "/health/", "/HEALTH"],
)  # fmt: skip
def test_every_route_but_health_needs_the_key(locked: RunningServer, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": f"Bearer {KEY}x"},
                    {"authorization": "Basic !!"}, {"authorization": KEY}):  # fmt: skip
        response = locked.get(path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.json()["error"]["type"] == "authentication_error"


def test_posts_need_the_key_too(locked: RunningServer) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        assert locked.post(path, {}).status_code == 401
    refused = locked.post("/v1/messages", {})
    assert refused.status_code == 401 and refused.json()["type"] == "error"


def test_the_key_opens(locked: RunningServer) -> None:
    assert locked.get("/health").status_code == 200
    assert locked.get("/version", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    assert locked.get("/version", headers={"authorization": f"bearer {KEY}"}).status_code == 200
    assert locked.get("/version", headers={"x-api-key": KEY}).status_code == 200
    assert locked.get("/version", auth=("anyone", KEY)).status_code == 200


def test_a_browser_is_asked_for_the_key(locked: RunningServer) -> None:
    assert locked.get("/").headers["www-authenticate"] == 'Basic realm="monotape"'
    assert "www-authenticate" not in locked.get("/v1/models").headers


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.evil.example", "[::1]evil.com",
     "localhost:80@evil.com", "localhost:evil.com", "localhost/evil.com", "evil.com#localhost", "localhost evil.com",
     "[localhost]", "[::1", "::1]", "localhost:", "localhost:80:80", "localhost,evil.com", "localhost:123456"],
)  # fmt: skip
def test_other_hosts_are_refused(scripted: RunningServer, host: str) -> None:
    response = scripted.get("/version", headers={"host": host})
    assert response.status_code in (400, 403)
    assert scripted.get("/health", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("names", [("localhost", "evil.example"), ("evil.example", "localhost")])
@pytest.mark.parametrize("header", ["Host", "Origin"])
def test_a_header_that_is_checked_comes_once(
    scripted: RunningServer, locked: RunningServer, header: str, names: tuple[str, str]
) -> None:
    """Of two, one would be checked and the other might be believed elsewhere."""
    for server in (scripted, locked):
        given = [f"{header}: {name if header == 'Host' else f'http://{name}'}" for name in names]
        rest = ["Host: localhost"] if header == "Origin" else []
        head = "\r\n".join(
            ["GET /version HTTP/1.1", *given, *rest, f"X-Api-Key: {KEY}", "Connection: close", "", ""]
        )
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
            client.sendall(head.encode())
            with client.makefile("rb") as stream:
                answer = stream.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert f"more than one {header} header".encode() in answer


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:1", "[::1]:80"])
def test_local_hosts_are_served(scripted: RunningServer, host: str) -> None:
    assert scripted.get("/version", headers={"host": host}).status_code == 200


def test_settings_name_hosts_and_origins_in_letters_of_any_size(locked: RunningServer) -> None:
    for name, value in (
        ("host", "Proxy.Example:8000"), ("origin", "https://other.example"), ("origin", "https://Other.Example"),
    ):  # fmt: skip
        response = locked.get("/version", headers={"x-api-key": KEY, name: value})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://[",
        "file://",
        "http://localhost:80@evil.com",
    ],
)
def test_other_origins_are_refused(scripted: RunningServer, origin: str) -> None:
    response = scripted.post("/v1/chat/completions", {}, headers={"origin": origin})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in response.headers


def test_the_own_origin_and_allowed_ones_are_served(scripted: RunningServer, locked: RunningServer) -> None:
    assert scripted.get("/version", headers={"origin": scripted.url}).status_code == 200
    headers = {"origin": "https://app.example", "x-api-key": KEY}
    response = locked.get("/version", headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    preflight = httpx.options(locked.url + "/v1/chat/completions", headers={"origin": "https://app.example"})
    assert preflight.status_code == 204
    assert "authorization" in preflight.headers["access-control-allow-headers"]


def test_a_page_of_an_allowed_origin_may_send_the_headers_of_any_client(locked: RunningServer) -> None:
    """A browser sends nothing at all where one of the headers it asks about is missing from the answer."""
    asked = "authorization,content-type,x-stainless-os,anthropic-dangerous-direct-browser-access"
    headers = {"origin": "https://app.example", "access-control-request-headers": asked}
    preflight = httpx.options(locked.url + "/v1/chat/completions", headers=headers)
    assert preflight.headers["access-control-allow-headers"] == asked
    headers["access-control-request-headers"] = "no header: at all"
    preflight = httpx.options(locked.url + "/v1/chat/completions", headers=headers)
    assert preflight.headers["access-control-allow-headers"].startswith("authorization, ")


def test_a_template_of_the_request_needs_the_flag_and_is_sandboxed(locked: RunningServer) -> None:
    def ask(template: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": template, "temperature": 0}
        return locked.post("/v1/chat/completions", body, headers={"x-api-key": KEY})

    assert ask("say:{{ 6 * 7 }}").json()["choices"][0]["message"]["content"] == "42"
    loop, end = "{% for a in range(9999) %}", "{% endfor %}"
    bomb = ask(3 * loop + 3 * end)
    assert bomb.status_code == 400 and "did not end within" in bomb.json()["error"]["message"]
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}"):
        assert "uid=" not in ask(attack).text


def test_the_size_of_a_body_is_bounded_however_it_comes(locked: RunningServer) -> None:
    parts = (b"x" * 1000 for _ in range(9))
    for content in (b"x" * 5001, parts):
        headers = {"x-api-key": KEY}
        refused = httpx.post(locked.url + "/tokenize", content=content, headers=headers, timeout=PATIENCE_S)
        assert refused.status_code == 413
        assert refused.json()["error"]["message"] == "The body is larger than 5000 bytes."


def test_errors_do_not_tell_paths(scripted: RunningServer) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{{"}], "tools": 3}),
        ("/tokenize", {}),
    ):
        assert "/" not in scripted.post(path, body).json()["error"]["message"].replace("/v1", "")
