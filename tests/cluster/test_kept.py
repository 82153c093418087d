"""Forty conversations over two replicas: every turn finds its KV, and says what one engine alone would say."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.running import real_cluster
from monotape import LLM, SamplingParams
from server.running import RunningServer
from server.small_models import safetensors_folder

pytestmark = pytest.mark.slow
CONVERSATIONS, TURNS, TOKENS = 40, 5, 12
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return safetensors_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[RunningServer]:
    """Two replicas that each keep half of the conversations, and some."""
    flags = (
        "--backend",
        "cpu",
        "--cpus-per-replica",
        "1",
        "--max-sequences",
        "32",
        "--served-model-name",
        "small",
    )
    with real_cluster(str(folder), *flags) as server:
        yield server.wait()


def question(number: int, turn: int) -> dict[str, Any]:
    """Conversations differ from their first words on: a pool may give one that is as good as another away."""
    return {"role": "user", "content": f"{hashlib.sha256(bytes([number])).hexdigest()} asks: {turn}?"}


def test_conversations_stay_where_their_kv_is(small: RunningServer, folder: Path) -> None:
    talks: list[Messages] = [[] for _ in range(CONVERSATIONS)]
    usages: list[list[dict[str, Any]]] = [[] for _ in range(CONVERSATIONS)]

    def turn(client: httpx.Client, number: int, index: int) -> None:
        talks[number].append(question(number, index))
        body = {"messages": talks[number], "temperature": 0, "max_tokens": TOKENS}
        answer = client.post(small.url + "/v1/chat/completions", json=body).json()
        talks[number].append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usages[number].append(answer["usage"])

    with ThreadPoolExecutor(8) as pool, httpx.Client(timeout=60) as client:
        for index in range(TURNS):  # a turn of each, so that every conversation comes back after 39 others
            list(pool.map(lambda number, index=index: turn(client, number, index), range(CONVERSATIONS)))
    found = [
        later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] - 1
        for usage in usages
        for earlier, later in itertools.pairwise(usage)
    ]
    assert len(found) == CONVERSATIONS * (TURNS - 1)
    assert sum(found) >= 0.95 * len(found), sum(found)
    assert talks == alone(folder)


def alone(folder: Path) -> list[Messages]:
    """The same conversations with one engine in this process."""
    talks: list[Messages] = [[] for _ in range(CONVERSATIONS)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    llm = LLM(str(folder), backend="cpu", workers=1, progress=False)
    for number, messages in enumerate(talks):
        for index in range(TURNS):
            messages.append(question(number, index))
            output = llm.chat(messages, params)
            text = output[0].outputs[0].text
            messages.append({"role": "assistant", "content": text})
    return talks
