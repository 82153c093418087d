"""Updates of a cluster that serves: replicas change one after another, come and go, and no request is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cluster.running import Cluster, update, wait_for_replicas
from processes import need_proc
from server.running import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.long]  # it waits for replicas to come and go
CHAT = "/v1/chat/completions"


@pytest.fixture
def asking(scripted: RunningServer) -> Iterator[list[httpx.Response]]:
    """Three users, who ask as soon as they have an answer; it holds every answer."""
    answers: list[httpx.Response] = []
    ended = threading.Event()

    def ask(user: int) -> None:
        with httpx.Client(timeout=120) as client:
            while not ended.is_set():
                body = {"messages": [{"role": "user", "content": f"u{user} rate=50 say:still here"}]}
                answers.append(client.post(scripted.url + CHAT, json=body))

    with ThreadPoolExecutor(3) as pool:
        users = [pool.submit(ask, user) for user in range(3)]
        yield answers
        ended.set()
        for user in users:
            user.result(120)


def right(answers: list[httpx.Response]) -> bool:
    return {answer.status_code for answer in answers} == {200} and {
        answer.json()["choices"][0]["message"]["content"] for answer in answers
    } == {"still here"}


def test_an_update_refuses_no_request(
    scripted: RunningServer, cluster: Cluster, asking: list[httpx.Response]
) -> None:
    need_proc()
    cluster.changed()
    before = wait_for_replicas(scripted, 2)
    update(scripted, max_queue=4, served_model_name=["second"])
    wait_for_replicas(scripted, 2, without=before)
    seen = len(asking)
    while len(asking) < seen + 10:
        assert right(asking)
    assert {answer.json()["model"] for answer in asking} == {"scripted", "second"}


def test_replicas_are_added_while_requests_wait(changing: RunningServer) -> None:
    need_proc()
    update(
        changing, max_queue=16, plan={"replicas": 1}
    )  # a scaled deployment keeps those that it has for minutes
    update(changing, max_queue=16, plan={"replicas": 1, "max_replicas": 2, "target_requests": 1})
    wait_for_replicas(changing, 1)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(changing.say, f"n{number} rate=20 repeat=60 say:x ") for number in range(6)]
        wait_for_replicas(changing, 2)
        assert {answer.result(120) for answer in answers} == {"x " * 60}
