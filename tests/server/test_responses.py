"""/v1/responses as agents use it, with a model that says what it is told."""

from __future__ import annotations

import json
from typing import Any

from server.running import RunningServer

CALL = '<think>hm</think>Well.<tool_call>{"name": "spawn", "arguments": {"task": "x"}}</tool_call>'
TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "agents",
        "tools": [{"type": "function", "name": "spawn", "strict": False}],
    },
    {"type": "web_search", "external_web_access": False},
]


def events(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    response = server.post("/v1/responses", {"stream": True, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_stream_of_thoughts_text_and_a_call(scripted: RunningServer) -> None:
    found = events(scripted, input=f"rate=900 say:{CALL}", tools=TOOLS)
    kinds = [event["type"].removeprefix("response.") for event in found]
    shown = [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    assert shown == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = found[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == output
    assert output[2]["namespace"] == "agents" and json.loads(output[2]["arguments"]) == {"task": "x"}
    assert found[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert found[-1]["response"]["timings"]["predicted_n"] > 3


def test_a_whole_conversation_is_rendered(scripted: RunningServer) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "One."}]},
        {"type": "message", "role": "developer", "content": "Two."},
        {"role": "user", "content": "Go."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "say:done"},
    ]
    response = scripted.post("/v1/responses", {"input": items, "tools": TOOLS, "temperature": 0}).json()
    said = response["output"][0]["content"][0]["text"]
    assert said == "done\n</tool_response>"  # a template without tools has results written so
    assert response["status"] == "completed" and response["error"] is None


def test_the_call_of_a_tool_is_echoed_with_the_settings(scripted: RunningServer) -> None:
    body = {
        "input": "say:hi",
        "tools": TOOLS,
        "metadata": {"a": "b"},
        "instructions": "Be brief.",
        "temperature": 0,
    }
    response = scripted.post("/v1/responses", body).json()
    assert response["tools"] == TOOLS and response["metadata"] == {"a": "b"} and response["store"] is False
