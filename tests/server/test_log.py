"""The server's log: one line a request, with what it cost or why it was refused."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from monotape.server.engine.prefill_log import PrefillLog
from monotape.server.http.access_log import printable
from server.running import RunningServer, scripted_server
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def logged() -> Iterator[RunningServer]:
    with scripted_server(any_model_name=True) as server:
        yield server.wait()


def lines(server: RunningServer, request_id: str) -> list[str]:
    """The lines about a request; the first may be a moment in coming."""

    def found() -> list[str]:
        return [line for line in server.lines if f"[{request_id}]" in line]

    until(found, lambda: f"{request_id} in {server.lines}")
    return found()


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_is_one_line_with_its_figures(logged: RunningServer, streamed: bool) -> None:
    question = f"rate=200 say:{'abcdefgh' * 3}"
    for turn in range(2):
        body = {"messages": [{"role": "user", "content": question}], "stream": streamed}
        response = logged.post(CHAT, body, headers={"x-request-id": f"figures-{streamed}-{turn}"})
        assert response.status_code == 200
        (line,) = lines(logged, f"figures-{streamed}-{turn}")
        found = re.search(
            rf"POST {CHAT} 200 in [\d.]+ s: prompt (\d+), cached (\d+)(?: \(.*\))?, answer (\d+) tokens, "
            r"first after \d+ ms, [\d.]+ tok/s",
            line,
        )
        assert found, line
        prompt, cached, answer = map(int, found.groups())
        assert prompt > len(question) / 2 and answer == 25
        assert 0 <= cached < prompt and (turn == 0 or cached > prompt // 2)


def test_a_line_says_where_an_earlier_prompt_changed(logged: RunningServer) -> None:
    rest = " ".join(f"rule {number * number}" for number in range(90))
    for stamp in ("17-04-11", "17-05-52"):
        body = [{"role": "system", "content": f"now {stamp}; {rest}"}, {"role": "user", "content": "say:ok"}]
        assert logged.post(CHAT, {"messages": body}, headers={"x-request-id": stamp}).status_code == 200
    (line,) = lines(logged, "17-05-52")
    assert re.search(r"an earlier prompt changed at token \d+; \d+ tokens after it are the same", line), line


def test_several_prompts_and_answers_are_added_up(logged: RunningServer) -> None:
    body = {"prompt": ["say:ab", "say:abc"], "n": 2, "temperature": 1, "max_tokens": 9}
    usage = logged.post("/v1/completions", body, headers={"x-request-id": "several"}).json()["usage"]
    (line,) = lines(logged, "several")
    assert f"prompt {usage['prompt_tokens']}, cached " in line
    assert f"answer {usage['completion_tokens']} tokens" in line


def test_a_client_that_left_shows_with_what_it_cost(logged: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "rate=50 repeat=9000 say:word "}], "stream": True}
    headers = {"x-request-id": "leaver"}
    with httpx.stream("POST", logged.url + CHAT, json=body, headers=headers, timeout=PATIENCE_S) as stream:
        for line in stream.iter_lines():
            if '"content":"w' in line:
                break
    (line,) = lines(logged, "leaver")
    assert re.search(rf"POST {CHAT} left in [\d.]+ s: prompt \d+, .*answer \d+ tokens", line), line


def test_the_path_of_a_404_and_the_reason_of_an_error(logged: RunningServer) -> None:
    logged.get("/v2/everything", headers={"x-request-id": "missing"})
    assert "GET /v2/everything 404 in" in lines(logged, "missing")[0]
    logged.post(CHAT, {"messages": []}, headers={"x-request-id": "empty"})
    assert "400 in" in lines(logged, "empty")[0] and "messages" in lines(logged, "empty")[0]


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("host", "llm.example:8000", "--allowed-hosts llm.example"),
        ("origin", "https://app.example", "--allowed-origins https://app.example"),
    ],
)
def test_a_403_names_the_option_it_is_about(
    logged: RunningServer, name: str, value: str, option: str
) -> None:
    refused = logged.get("/version", headers={name: value, "x-request-id": f"refused-{name}"})
    assert refused.status_code == 403
    assert f"Start the server with {option} to allow it." in refused.json()["error"]["message"]
    assert option in lines(logged, f"refused-{name}")[0]


def test_a_prompt_that_takes_long_shows_how_far_it_is(logged: RunningServer) -> None:
    question = "prefill=7000 say:read" + "x" * 3000
    logged.post(CHAT, {"messages": [{"role": "user", "content": question}]}, headers={"x-request-id": "long"})
    (line,) = lines(logged, "long")
    shown = [line for line in logged.lines if "Prompt: " in line]
    found = re.search(
        r"Prompt: (\d+) of (\d+) tokens read \((\d+) cached\), (\d+) % after \d+ s, \d+ tok/s", shown[0]
    )
    assert found, shown
    filled, prompt, cached, share = map(int, found.groups())
    assert cached < filled < prompt and share == round(100 * filled / prompt)
    assert f"prompt {prompt}, cached {cached}" in line


def test_prefill_lines_come_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = PrefillLog(1000, 200, 50.0)
    for now, filled in ((51.0, 250), (55.0, 400), (56.0, 450), (60.5, 600)):
        log.look(now, filled)
    log.look(66.0, 200)
    assert [record.message for record in caplog.records] == [
        "Prompt: 400 of 1000 tokens read (200 cached), 40 % after 5 s, 40 tok/s.",
        "Prompt: 600 of 1000 tokens read (200 cached), 60 % after 10 s, 38 tok/s.",
        "Prompt: 1000 tokens (200 cached) are being read, for 16 s so far.",
    ]


def test_no_client_writes_lines_of_its_own(logged: RunningServer) -> None:
    host, port = logged.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        request = "GET /a%0aFORGED%1b[2J HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: forger\r\n\r\n"
        client.sendall(request.encode())
        assert b"404" in client.recv(4096)
    assert r"/a\nFORGED\x1b[2J" in lines(logged, "forger")[0]
    assert not [line for line in logged.lines if line.startswith("FORGED")]
    assert len(printable("x" * 1000)) < 400


def test_any_name_is_served_where_the_option_says_so(logged: RunningServer, scripted: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "say:hi"}], "model": "gpt-5", "max_tokens": 5}
    for path in (CHAT, "/v1/messages"):
        assert logged.post(path, body).json()["model"] == "gpt-5"
        refused = scripted.post(path, body)
        assert refused.status_code == 404
        assert "--served-model-name" in refused.json()["error"]["message"]
        assert "--any-model-name" in refused.json()["error"]["message"]
    assert logged.get("/v1/models/gpt-5").json()["id"] == "gpt-5"
    assert [model["id"] for model in logged.get("/v1/models").json()["data"]] == ["scripted"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/api/embed"])
def test_embeddings_are_said_not_to_be_made(scripted: RunningServer, path: str) -> None:
    refused = scripted.post(path, {"input": "x", "model": "scripted"})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["code"] == "embeddings_not_supported"
    assert error["message"].startswith("This engine does not make embeddings")
