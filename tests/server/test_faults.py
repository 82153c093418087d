"""What goes wrong in life: clients that leave, too many of them, an engine that dies, hangs or fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes import children, need_proc
from server.running import RunningServer, scripted_server
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def running(server: RunningServer) -> float:
    return server.metric("vllm:num_requests_running")


@contextlib.contextmanager
def connection(server: RunningServer, payload: dict[str, Any], path: str = CHAT) -> Iterator[socket.socket]:
    """A request on a bare socket, which can be cut at any moment."""
    data = json.dumps(payload).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as opened:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        opened.sendall(head.encode() + data)
        yield opened


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after", [0, 1, 50])
def test_a_client_that_leaves_frees_the_engine(scripted: RunningServer, streamed: bool, after: int) -> None:
    before = scripted.metric("monotape_disconnects_total")
    finished = scripted.metric("vllm:request_success_total")
    with connection(scripted, body("prefill=300 rate=100 repeat=5000 say:tape ", stream=streamed)) as client:
        until(lambda: running(scripted) == 1)
        if after and streamed:
            received = b""
            while received.count(b"data: ") < 1 + after:
                more = client.recv(4096)
                assert more, received  # an ended stream gives nothing, for ever
                received += more
        elif after:
            time.sleep(0.3 + after / 100)
    until(lambda: running(scripted) == 0)
    assert scripted.metric("monotape_disconnects_total") == before + 1
    assert scripted.metric("vllm:request_success_total") == finished  # no client was left to answer
    assert scripted.say("say:next") == "next"


@pytest.mark.parametrize("streamed", [True, False])
def test_figures_count_the_work_for_a_client_that_leaves(
    scripted: RunningServer, tmp_path: Path, streamed: bool
) -> None:
    """The prompt, what was cached of it and the tokens that were made; it is no success."""
    names = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:generation_tokens_total")
    asked = body(f"{tmp_path} hold={tmp_path / 'closed'} say:a completion that is held after three tokens")
    usage = scripted.post(CHAT, asked).json()["usage"]
    (tmp_path / "closed").touch()
    before = {name: scripted.metric(name) for name in names}
    missed = scripted.metric("monotape_prefix_cache_misses_total")
    finished = scripted.metric("vllm:request_success_total")
    with connection(scripted, {**asked, "stream": streamed}) as client:
        received = b""
        while streamed and received.count(b'"content":') < 3:
            received += client.recv(4096)
        until(lambda: running(scripted) == 1)
    until(lambda: running(scripted) == 0)
    prompt, cached, made = (scripted.metric(name) - before[name] for name in names)
    assert prompt == usage["prompt_tokens"] and 0 < cached < prompt
    assert made >= 3 * streamed
    assert scripted.metric("monotape_prefix_cache_misses_total") == missed
    assert scripted.metric("vllm:request_success_total") == finished


def test_who_comes_back_finds_what_was_read_of_the_prompt(scripted: RunningServer) -> None:
    """As Claude Code does it: it leaves when nothing has come for some time, and sends the same again."""
    asked = body("prefill=4000 say:back, " + "tape " * 50)
    for _ in range(2):
        with connection(scripted, {**asked, "stream": True}):
            until(lambda: running(scripted) == 1)
            time.sleep(1)
        until(lambda: running(scripted) == 0)
    answer = scripted.post(CHAT, asked).json()
    assert answer["choices"][0]["message"]["content"].startswith("back, tape")
    usage = answer["usage"]
    assert usage["prompt_tokens"] / 4 < usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_a_scoring_frees_the_engine(scripted: RunningServer, streamed: bool) -> None:
    """Every piece of the prompt takes a third of a second, and all of them half a minute."""
    asked = {
        "prompt": "logits=300 say:" + "tape" * 1600, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": streamed,
    }  # fmt: skip
    before = scripted.metric("monotape_disconnects_total")
    restarts = scripted.metric("monotape_engine_restarts")
    with connection(scripted, asked, "/v1/completions"):
        until(lambda: running(scripted) == 1)
    until(lambda: running(scripted) == 0)
    assert scripted.metric("monotape_disconnects_total") == before + 1
    assert scripted.metric("monotape_engine_restarts") == restarts  # it was let go, and did not die of it
    assert scripted.say("say:next") == "next"


@pytest.mark.slow
def test_a_real_scoring_is_left_too(smollm2: RunningServer) -> None:
    """On the CPU backend it would take minutes."""
    asked = {
        "prompt": [index % 40_000 for index in range(8_000)],
        "echo": True,
        "logprobs": 5,
        "max_tokens": 1,
    }
    with connection(smollm2, asked, "/v1/completions"):
        until(lambda: running(smollm2) == 1)
        time.sleep(0.5)  # well into it
        assert running(smollm2) == 1
    until(lambda: running(smollm2) == 0)
    assert smollm2.metric("monotape_engine_restarts") == 0
    assert smollm2.say("Say hello.", max_tokens=5)


def test_a_client_that_leaves_the_queue_is_forgotten(scripted: RunningServer) -> None:
    with connection(scripted, body("rate=100 repeat=5000 say:long ", stream=True)):
        until(lambda: running(scripted) == 1)
        with connection(scripted, body("say:never")):
            until(lambda: scripted.metric("vllm:num_requests_waiting") == 1)
        until(lambda: scripted.metric("vllm:num_requests_waiting") == 0)
        assert running(scripted) == 1
    until(lambda: running(scripted) == 0)
    assert scripted.say("say:next") == "next"


def test_the_queue_is_bounded_and_says_when_to_come_back(scripted: RunningServer) -> None:
    with (
        ThreadPoolExecutor(8) as pool,
        connection(scripted, body("rate=50 repeat=5000 say:long ", stream=True)),
    ):
        until(lambda: running(scripted) == 1)
        waiting = [pool.submit(scripted.post, CHAT, body(f"say:turn {turn}")) for turn in range(4)]
        until(lambda: scripted.metric("vllm:num_requests_waiting") == 4)
        for path, payload in (
            (CHAT, body("say:x")),
            ("/v1/completions", {"prompt": "say:x"}),
            ("/v1/responses", {"input": "x"}),
        ):
            refused = scripted.post(path, payload)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "it has 5 requests already and runs one at a time" in error["message"]
        # No work is done for refused requests: not even this is checked.
        unrendered = {"messages": [{"role": "tool", "content": [{"type": "image"}]}]}
        assert scripted.post(CHAT, unrendered).status_code == 429
        assert scripted.post(CHAT, {**unrendered, "model": "other"}).status_code == 429
        anthropic = scripted.post("/v1/messages", {**body("say:x"), "max_tokens": 3})
        assert anthropic.status_code == 429 and anthropic.json()["error"]["type"] == "rate_limit_error"
        streamed = scripted.post(CHAT, body("say:x", stream=True))
        assert streamed.status_code == 429  # before the stream begins
        assert scripted.get("/health").status_code == 200
    answers = [answer.result().json()["choices"][0]["message"]["content"] for answer in waiting]
    assert answers == [f"turn {turn}" for turn in range(4)]


def test_two_hundred_clients_get_their_own_answers_or_429(scripted: RunningServer) -> None:
    """Every answer is the one that was asked for: none is lost, none is crossed."""

    host = scripted.url.removeprefix("http://")

    def ask(number: int) -> int:
        with contextlib.closing(http.client.HTTPConnection(host, timeout=PATIENCE_S)) as client:
            for attempt in range(3):
                word = f"client {number} attempt {attempt}"
                client.request("POST", CHAT, json.dumps(body(f"say:{word}")))
                response = client.getresponse()
                answer = json.loads(response.read())
                if response.status == 200:
                    assert answer["choices"][0]["message"]["content"] == word
                    return 1
                assert response.status == 429 and response.getheader("retry-after")
        return 0

    with ThreadPoolExecutor(50) as pool:
        served = sum(pool.map(ask, range(200)))
    assert served >= 1
    assert running(scripted) == 0
    assert scripted.say("say:all quiet") == "all quiet"


def test_nothing_of_one_conversation_reaches_another(scripted: RunningServer) -> None:
    for turn in range(8):
        secret = f"canary-{turn}-{os.urandom(4).hex()}"
        scripted.chat(f"Keep this: {secret}. say:kept")
        other = scripted.post(CHAT, body("say:what do you know?", logprobs=True, top_logprobs=5)).text
        assert secret not in other
        assert secret not in scripted.get("/metrics").text


def test_a_slow_reader_holds_nobody_up(scripted: RunningServer) -> None:
    with connection(scripted, body("repeat=9000 say:x ", stream=True)) as slow:
        slow.recv(1)
        until(lambda: running(scripted) == 0)
        assert scripted.say("say:meanwhile") == "meanwhile"


def test_a_prompt_that_is_read_slowly_is_no_hang() -> None:
    """It takes several times as long as the engine may take without any progress."""
    with scripted_server(engine_timeout=1) as server:
        assert server.wait().say("prefill=6000 say:read") == "read"
        assert server.metric("monotape_engine_restarts") == 0


@pytest.fixture(scope="module")
def mortal() -> Iterator[RunningServer]:
    with scripted_server(engine_timeout=2) as server:
        yield server.wait()


def engine_pid(server: RunningServer) -> int:
    need_proc()
    found = children(server.process.pid).items()
    return next(pid for pid, command in found if "server.engine.process" in command)


def test_an_engine_that_is_killed_is_reported_and_replaced(tmp_path: Path) -> None:
    gate = tmp_path / "closed"  # while it is there no engine gets ready, however quick it is
    with scripted_server(engine={"model": str(gate)}) as mortal:
        kill_and_ask(mortal.wait(), gate)


def kill_and_ask(mortal: RunningServer, gate: Path) -> None:
    with httpx.stream(
        "POST", mortal.url + CHAT, json=body("rate=50 repeat=900 say:word ", stream=True), timeout=PATIENCE_S
    ) as stream:
        lines = stream.iter_lines()
        while "content" not in next(lines):
            pass
        waiting: list[httpx.Response] = []
        patient = threading.Thread(target=lambda: waiting.append(mortal.post(CHAT, body("say:patient"))))
        patient.start()
        until(lambda: mortal.metric("vllm:num_requests_waiting") == 1)
        gate.touch()
        os.kill(engine_pid(mortal), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
    assert error["message"] == "The engine process ended unexpectedly; it is being restarted."
    health = mortal.get("/health")
    assert health.status_code == 503 and health.json()["error"]["code"] == "engine_unavailable"
    refused = mortal.post(CHAT, body("say:x"))
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    gate.unlink()
    until(lambda: mortal.get("/health").status_code == 200)
    patient.join(PATIENCE_S)
    assert waiting[0].json()["choices"][0]["message"]["content"] == "patient"  # it only had to wait
    assert mortal.say("say:alive") == "alive"
    assert mortal.metric("monotape_engine_restarts") == 1

    plain = mortal.post(CHAT, body("kill say:abcdef"))
    assert plain.status_code == 503 and plain.json()["error"]["code"] == "engine_unavailable"
    until(lambda: mortal.get("/health").status_code == 200)
    assert mortal.say("say:again") == "again"


@pytest.mark.parametrize(
    ("accident", "status", "code"), [("hang", 503, "engine_unavailable"), ("deadline", 500, "model_fault")]
)
def test_an_engine_that_hangs_or_fails_is_replaced(
    mortal: RunningServer, accident: str, status: int, code: str
) -> None:
    before = mortal.metric("monotape_engine_restarts")
    failed = mortal.post(CHAT, body(f"{accident} say:abcdef"))
    assert failed.status_code == status and failed.json()["error"]["code"] == code
    until(lambda: mortal.metric("monotape_engine_restarts") == before + 1)
    until(lambda: mortal.get("/health").status_code == 200)
    assert mortal.say("say:alive") == "alive"


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    with scripted_server(engine={"model": "broken"}) as server:
        assert server.process.wait(PATIENCE_S) == 1
    assert server.lines[-1] == "monotape: model.safetensors is 3 bytes long. Download it again."


def test_a_signal_ends_the_server_in_good_order() -> None:
    with scripted_server() as server:
        pid = engine_pid(server.wait())
        assert server.end() == 0
        until(lambda: not os.path.exists(f"/proc/{pid}"))
