"""`monotape serve` as it is installed: small models of both file formats through every library that it stands on.

`make test-minimums` runs this file with the oldest versions that pyproject.toml allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.running import RunningServer, real_server
from server.small_models import gguf_file, safetensors_folder
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["yes", "no"]}},
    "required": ["ok", "word"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("model")
    made = safetensors_folder(folder) if request.param == "safetensors" else gguf_file(folder / "m.gguf")
    with real_server(str(made), "--backend", "cpu", "--served-model-name", "small") as running:
        yield running.wait()


def test_a_chat_is_answered(server: RunningServer) -> None:
    found = server.chat("hello", max_tokens=9)
    assert found["usage"]["completion_tokens"] in range(1, 10)
    assert found["usage"]["prompt_tokens"] > 10


def test_an_answer_obeys_its_schema(server: RunningServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = json.loads(server.say("hello", response_format=wanted, max_tokens=200))
    assert type(answer["ok"]) is bool and answer["word"] in ("yes", "no")


def test_a_tool_that_is_asked_for_is_called(server: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "look"}}
    found = server.chat("hello", tools=[tool], tool_choice=choice, max_tokens=300)
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["word"] in ("yes", "no")


def test_a_stream_ends(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 7}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


def test_the_other_apis_answer(server: RunningServer) -> None:
    body = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200 and answer.json()["type"] == "message", answer.text
    responses = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 16})
    assert responses.json()["object"] == "response"
    assert server.post("/v1/completions", {"prompt": "hello", "max_tokens": 5}).status_code == 200


def test_pages_and_figures_are_there(server: RunningServer) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/openapi.json").json()["openapi"]
    assert "<html" in server.get("/").text
    assert server.metric("monotape_http_requests") >= 1


def test_the_command_line_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from monotape.cli.main import main

    assert (
        main(["run", "hello", "--model", str(gguf_file(tmp_path / "m.gguf")), "--max-tokens", "5", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["finish_reason"] in ("stop", "length")
