"""Updates of a cluster that serves: replicas change one after another, come and go, and no request is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.running import SCRIPTED, Cluster, fronts, update, wait_for_replicas
from processes import need_proc
from server.running import RunningServer
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
USERS, PAUSE_S = 3, 0.2


@dataclass(frozen=True)
class Answer:
    """An answer, and when its user asked and had it."""

    user: int
    asked: float
    ended: float
    response: httpx.Response

    @property
    def body(self) -> dict[str, Any]:
        assert self.response.status_code == 200, self.response.text
        found: dict[str, Any] = self.response.json()
        return found


@pytest.fixture
def asking(smollm2: RunningServer) -> Iterator[list[Answer]]:
    """Users who ask again soon after each answer; it holds every answer. A scripted model says what they ask for."""
    answers: list[Answer] = []
    ended = threading.Event()

    def ask(user: int) -> None:
        messages = [{"role": "user", "content": f"u{user} rate=50 say:here"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 8}
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not ended.wait(PAUSE_S):
                asked = time.monotonic()
                response = client.post(smollm2.url + CHAT, json=body)
                answers.append(Answer(user, asked, time.monotonic(), response))

    with ThreadPoolExecutor(USERS) as pool:
        users = [pool.submit(ask, user) for user in range(USERS)]
        yield answers
        ended.set()
        for user in users:
            user.result(PATIENCE_S)


def wait_for_answers(answers: list[Answer], count: int) -> None:
    """That many more."""
    seen = len(answers)
    until(lambda: len(answers) >= seen + count, "another answer")


def test_an_update_to_another_model_refuses_no_request(
    smollm2: RunningServer, cluster: Cluster, asking: list[Answer]
) -> None:
    """Every answer is one model's or the other's, and the front is there throughout: the new one starts first."""
    need_proc()
    before, (front,) = wait_for_replicas(smollm2, 2), fronts(smollm2)
    wait_for_answers(asking, 2 * USERS)
    with ThreadPoolExecutor(1) as pool:
        updated = pool.submit(cluster.use, "scripted", SCRIPTED)
        while len(fronts(smollm2)) < 2:
            assert not updated.done(), "the front has not been replaced"
            time.sleep(0.05)
        both = seen = time.monotonic()
        while front in fronts(smollm2):
            seen = time.monotonic()
            time.sleep(0.05)
        updated.result()
    wait_for_replicas(smollm2, 2, without=before)
    wait_for_answers(asking, 2 * USERS)
    said = {(one.user, one.body["model"], one.body["choices"][0]["message"]["content"]) for one in asking}
    assert len(said) == 2 * USERS, said
    assert {text for _, model, text in said if model == "scripted"} == {"here"}
    under_way = [one for one in asking if one.asked < seen and one.ended > both]
    assert under_way, "no request was under way while there were two fronts"


def test_replicas_are_removed_in_calm_and_added_while_requests_wait(changing: RunningServer) -> None:
    need_proc()
    wait_for_replicas(changing, 2)
    scaling = {"max_replicas": 2, "target_requests": 1, "upscale_delay": 0, "downscale_delay": 0}
    update(
        changing, max_queue=4, plan={"replicas": 1, **scaling}
    )  # the queue as it was: no replica is replaced
    wait_for_replicas(changing, 1)
    scaled = threading.Event()

    def ask(user: int) -> set[str]:
        said = {changing.say(f"n{user} rate=50 repeat=9 say:x ")}
        while not scaled.is_set():
            said.add(changing.say(f"n{user} rate=50 repeat=9 say:x "))
        return said

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, user) for user in range(4)]
        wait_for_replicas(changing, 2)
        scaled.set()
        assert [answer.result(PATIENCE_S) for answer in answers] == [{"x " * 9}] * 4
