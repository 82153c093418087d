"""What happens to two replicas: one is killed, clients leave, queues fill."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import pytest

from cluster.running import wait_for_replicas
from processes import descendants, need_proc, wait_for_end
from server.running import NO_TLS, RunningServer
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"


def streamed(server: RunningServer, text: str, name: str = "") -> tuple[str, list[dict[str, object]]]:
    """The text of a streamed chat and its errors."""
    messages = [{"role": "user", "content": f"{name} {text}"}]
    said, errors = "", []
    body = {"messages": messages, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=PATIENCE_S, verify=NO_TLS) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                errors += [chunk["error"]] if "error" in chunk else []
                said += "".join(choice["delta"].get("content", "") for choice in chunk.get("choices", []))
    return said, errors


def wait_until(server: RunningServer, running: int, waiting: int) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    until(lambda: tuple(server.metric(name) for name in names) == (running, waiting))


def test_a_replica_that_is_killed_loses_its_running_request_and_comes_back(
    scripted: RunningServer, tmp_path: Path
) -> None:
    need_proc()
    gate = tmp_path / "closed"  # while it is there no answer ends, however slow the tests are
    gate.touch()
    before = wait_for_replicas(scripted, 2)
    talks = [
        [{"role": "user", "content": f"talk {number} say:first"}] for number in range(4)
    ]  # at either replica
    assert [_turn(scripted, talk, "second") for talk in talks] == ["first"] * 4
    with ThreadPoolExecutor(4) as pool:
        text = f"hold={gate} repeat=20 say:tick "
        answers = [pool.submit(streamed, scripted, text, f"c{number}") for number in range(4)]
        wait_until(scripted, running=2, waiting=2)
        children = descendants(before[0])
        os.kill(before[0], signal.SIGKILL)
        gate.unlink()
        results = [answer.result(PATIENCE_S) for answer in answers]
    lost = [errors for _, errors in results if errors]
    assert len(lost) == 1 and lost[0][0]["code"] == "engine_unavailable"
    assert [said for said, errors in results if not errors] == ["tick " * 20] * 3
    wait_for_end(*children)  # no engine stays behind
    assert [_turn(scripted, talk, "third") for talk in talks] == [
        "second"
    ] * 4  # some are computed anew elsewhere
    wait_for_replicas(scripted, 2, without=before[:1])
    with (
        ThreadPoolExecutor(4) as pool,
        httpx.Client(timeout=PATIENCE_S) as client,
    ):  # one replica has places for as many
        said = list(pool.map(lambda number: _word(client, scripted.url, number), range(1000)))
    assert said == [f"word {number}" for number in range(1000)]


def _turn(server: RunningServer, talk: list[dict[str, str]], following: str) -> str:
    """What the next answer of a conversation says; the user's next question asks for what follows."""
    message = server.post(CHAT, {"messages": talk}).json()["choices"][0]["message"]
    talk += [
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": f"say:{following}"},
    ]
    return str(message["content"])


def _word(client: httpx.Client, url: str, number: int) -> str:
    body = {"messages": [{"role": "user", "content": f"say:word {number}"}]}
    return str(client.post(url + CHAT, json=body).json()["choices"][0]["message"]["content"])


def test_an_engine_that_is_killed_loses_its_running_request_alone(scripted: RunningServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        killed = pool.submit(streamed, scripted, "rate=40 repeat=9 kill say:tick ", "k")
        other = pool.submit(streamed, scripted, "rate=40 repeat=12 say:tock ", "o")
        assert killed.result(PATIENCE_S)[1][0]["code"] == "engine_unavailable"
        assert other.result(PATIENCE_S) == ("tock " * 12, [])
    assert [scripted.say(f"say:{number}") for number in range(8)] == [str(number) for number in range(8)]


@contextlib.contextmanager
def both_taken(server: RunningServer) -> Iterator[None]:
    """Both replicas are at work on answers that would not end for minutes, until their clients leave."""
    lines: list[Iterator[str]] = []
    with httpx.Client(timeout=PATIENCE_S, verify=NO_TLS) as client, contextlib.ExitStack() as streams:
        for name in ("a", "b"):
            messages = [{"role": "user", "content": f"{name} rate=10 repeat=5000 say:on "}]
            body = {"messages": messages, "stream": True}
            endless = streams.enter_context(client.stream("POST", server.url + CHAT, json=body))
            lines.append(endless.iter_lines())  # an iterator that is let go of closes its stream
            next(lines[-1])
        wait_until(server, running=2, waiting=0)
        yield


def test_a_client_that_leaves_frees_its_replica(scripted: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        with both_taken(scripted):
            third = pool.submit(scripted.say, "say:at last")
            wait_until(scripted, running=2, waiting=1)
        assert third.result(PATIENCE_S) == "at last"
    wait_until(scripted, running=0, waiting=0)


def test_queues_that_are_full_are_answered_with_429(scripted: RunningServer) -> None:
    """Two run and four wait for each; whatever comes then is refused, and nothing else."""

    def ask(number: int) -> httpx.Response:
        return scripted.post(CHAT, {"messages": [{"role": "user", "content": f"q{number} say:x"}]})

    with ThreadPoolExecutor(14) as pool:
        with both_taken(scripted):
            answers = [pool.submit(ask, number) for number in range(14)]
            refused = [answer.result() for answer in itertools.islice(as_completed(answers, PATIENCE_S), 6)]
            wait_until(scripted, running=2, waiting=8)
        codes = sorted(answer.result(PATIENCE_S).status_code for answer in answers)
    assert codes == [200] * 8 + [429] * 6
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"


def test_figures_count_every_replica(scripted: RunningServer) -> None:
    before = scripted.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        made = sum(
            pool.map(lambda n: scripted.chat(f"f{n} say:abc")["usage"]["completion_tokens"], range(12))
        )
    assert scripted.metric("vllm:generation_tokens_total") == before + made
