"""Forty conversations over two replicas: every turn finds its KV, and says what one engine alone would say."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.conftest import KEY
from server.running import RunningServer, real_server
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow
TURNS, TOKENS = 5, 12


@dataclass
class Talk:
    """A conversation so far."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)


def question(number: int, turn: int, common: bool) -> str:
    """Conversations differ from their first words on, or share a beginning that is most of their first turn."""
    name = hashlib.sha256(bytes([number])).hexdigest()
    beginning = "Answer in one word, and in English. " * 16 if common and turn == 0 else ""
    return f"{beginning}{name} asks: {turn}?"


def take_turn(client: httpx.Client, talk: Talk, question: str) -> None:
    talk.messages.append({"role": "user", "content": question})
    body = {"messages": talk.messages, "temperature": 0, "max_tokens": TOKENS, "logprobs": True}
    answer = client.post("/v1/chat/completions", json=body).json()
    said = answer["choices"][0]
    talk.messages.append(said["message"])
    talk.logprobs.append(said["logprobs"]["content"])
    talk.usages.append(answer["usage"])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[RunningServer]:
    """A single server."""
    with real_server(str(folder), "--backend", "cpu", "--workers", "1") as server:
        yield server.wait()


@pytest.mark.parametrize(
    ("conversations", "common"), [(40, False), (20, True)], ids=["of-their-own", "shared-beginning"]
)
def test_conversations_stay_where_their_kv_is(
    small: RunningServer, alone: RunningServer, conversations: int, common: bool
) -> None:
    talks, expected = ([Talk() for _ in range(conversations)] for _ in range(2))
    with (
        ThreadPoolExecutor(8) as pool,
        httpx.Client(base_url=small.url, timeout=PATIENCE_S, headers={"x-api-key": KEY}) as client,
    ):
        for index in range(TURNS):  # a turn of each, so that every conversation comes back after all others
            questions = [question(number, index, common) for number in range(conversations)]
            list(pool.map(take_turn, itertools.repeat(client), talks, questions))
    found = [
        later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] - 1
        for talk in talks
        for earlier, later in itertools.pairwise(talk.usages)
    ]
    assert len(found) == conversations * (TURNS - 1)
    assert sum(found) >= 0.95 * len(found), sum(found)
    with httpx.Client(base_url=alone.url, timeout=PATIENCE_S) as client:
        for number, talk in enumerate(expected):
            for index in range(TURNS):
                take_turn(client, talk, question(number, index, common))
    assert [talk.messages for talk in talks] == [talk.messages for talk in expected]
    assert [talk.logprobs for talk in talks] == [talk.logprobs for talk in expected]  # bit for bit
