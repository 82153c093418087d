"""A client's prediction, and what is told of drafts: usage, timings, metrics and the log; with the `openai` package."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine.vocabularies import byte_level
from lookup import counted_drafts
from monotape.engine.tokenizer import Tokenizer
from monotape.weights.checkpoint import TextAssets
from server.running import PATIENCE_S, RunningServer, scripted_server

CHAT = "/v1/chat/completions"
SAID = "def area(width, height):\n    return width * height\n"
PREDICTED = SAID.replace("area", "size")
ASKED: Any = [{"role": "user", "content": f"say:{SAID}"}]


@pytest.fixture
def client(scripted: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> tuple[int, int]:
    """Drafts and accepted ones of SAID, where PREDICTED was predicted."""
    vocabulary = byte_level()
    tokenizer = Tokenizer.from_assets(TextAssets(vocabulary=vocabulary))
    assert tokenizer is not None
    output = [*tokenizer.encode(SAID, add_special=False), vocabulary.tokens.index("<|end|>")]
    drafted, accepted = counted_drafts(tokenizer.encode_text(PREDICTED), output)
    assert 0 < accepted < drafted
    return drafted, accepted


def details(usage: Any) -> tuple[int, int]:
    found = usage.completion_tokens_details
    return (
        found.accepted_prediction_tokens + found.rejected_prediction_tokens,
        found.accepted_prediction_tokens,
    )


PARTS = [{"type": "text", "text": PREDICTED[:9]}, {"type": "text", "text": PREDICTED[9:]}]


@pytest.mark.parametrize("content", [PREDICTED, PARTS], ids=["text", "parts"])
def test_a_prediction_is_checked_and_counted(
    client: openai.OpenAI, expected: tuple[int, int], content: Any
) -> None:
    prediction: Any = {"type": "content", "content": content}
    plain = client.chat.completions.create(model="scripted", messages=ASKED, temperature=0)
    answer = client.chat.completions.create(
        model="scripted", messages=ASKED, temperature=0, prediction=prediction
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content == SAID
    assert details(answer.usage) == expected and details(plain.usage) == (0, 0)
    timings = (answer.model_extra or {})["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == expected


def test_a_stream_counts_them_in_its_usage(client: openai.OpenAI, expected: tuple[int, int]) -> None:
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=ASKED, temperature=0, stream=True, stream_options={"include_usage": True},
            prediction={"type": "content", "content": PREDICTED},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
    assert details(chunks[-1].usage) == expected


def test_several_answers_add_up(client: openai.OpenAI, expected: tuple[int, int]) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=ASKED,
        temperature=1,
        n=2,
        prediction={"type": "content", "content": PREDICTED},
    )
    assert len(answer.choices) == 2
    assert details(answer.usage) == tuple(2 * count for count in expected)


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_prediction_predicts_nothing(scripted: RunningServer, content: Any) -> None:
    body = {"messages": ASKED, "temperature": 0, "prediction": {"type": "content", "content": content}}
    answer = scripted.post(CHAT, body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"), (7, "prediction"), ([], "prediction"), ({}, "prediction"),
        ({"type": "content"}, "prediction"), ({"content": "x"}, "prediction"),
        ({"type": "tokens", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "image_url", "text": "x"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text", "text": 5}]}, "prediction.content[0].text"),
        ({"type": "content", "content": "x" * 20_001}, "prediction"),
        ({"type": "content", "content": "x" * 5_000_000}, "prediction"),
    ],
)  # fmt: skip
def test_what_is_no_prediction_is_refused_by_name(
    scripted: RunningServer, prediction: Any, param: str
) -> None:
    answer = scripted.post(CHAT, {"messages": ASKED, "prediction": prediction})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "prediction" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "say:hi"}),
        ("/v1/responses", {"input": "say:hi"}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 5}),
    ],
)
def test_other_routes_take_none(scripted: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = scripted.post(path, {**body, "prediction": {"type": "content", "content": "x"}})
    assert answer.status_code == 400
    assert f"prediction is not supported: POST {path} does not take it." in answer.json()["error"]["message"]


def test_metrics_count_drafts(scripted: RunningServer, expected: tuple[int, int]) -> None:
    names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    before = [scripted.metric(name) for name in names]
    body = {"messages": ASKED, "temperature": 0, "prediction": {"type": "content", "content": PREDICTED}}
    assert scripted.post(CHAT, body).status_code == 200
    assert tuple(scripted.metric(name) - old for name, old in zip(names, before, strict=True)) == expected


def test_the_log_tells_of_drafts(scripted: RunningServer, expected: tuple[int, int]) -> None:
    body = {"messages": ASKED, "temperature": 0, "prediction": {"type": "content", "content": PREDICTED}}
    scripted.post(CHAT, body, headers={"x-request-id": "drafting"})
    told = f"drafts {expected[0]}, accepted {expected[1]}"
    until = time.monotonic() + PATIENCE_S
    while not (found := [line for line in scripted.lines if "drafting" in line]) and time.monotonic() < until:
        time.sleep(0.01)
    assert told in found[0]


def test_a_server_without_speculation_takes_predictions_and_checks_none() -> None:
    body = {"messages": ASKED, "temperature": 0, "prediction": {"type": "content", "content": PREDICTED}}
    with scripted_server(engine={"model": "scripted", "speculation": False}) as server:
        answer = server.wait().post(CHAT, body).json()
    assert answer["choices"][0]["message"]["content"] == SAID
    assert answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0
