"""/v1/responses as agents use it, with a model that says what it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from monotape.server.requests.responses import ResponsesRequest, to_chat
from monotape.server.requests.responses_tools import chat_tools, text_in
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
        if block.startswith(":"):  # a comment: how far the prompt has been read
            continue
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


def test_thoughts_words_and_a_call_that_are_sent_back_are_one_turn() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "Well."},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "Another."},
    ]
    first, second = to_chat(ResponsesRequest(input=items)).messages
    assert (first["role"], first["content"], first["reasoning_content"]) == ("assistant", "Well.", "hm")
    assert len(first["tool_calls"]) == 1
    assert second == {"role": "assistant", "content": "Another."}


@pytest.mark.parametrize("tool", [TOOLS[0], {"type": "custom", "name": "shell"}])
def test_an_item_that_was_cut_off_is_incomplete(scripted: RunningServer, tool: dict[str, Any]) -> None:
    call = json.dumps({"name": "shell", "arguments": {"input": "x" * 99}})
    found = events(
        scripted, input=f"say:Well.<tool_call>{call}</tool_call>", tools=[tool], max_output_tokens=80
    )
    assert found[-1]["type"] == "response.incomplete"
    output = found[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["completed", "incomplete"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == output


@pytest.mark.parametrize(("limit", "status"), [(50, "incomplete"), (52, "completed"), (58, "completed")])
def test_a_call_whose_arguments_are_whole_may_be_made_where_the_limit_cuts_what_follows(
    scripted: RunningServer, limit: int, status: str
) -> None:
    call = json.dumps({"name": "shell", "arguments": {"input": "x"}})
    found = events(scripted, input=f"say:<tool_call>{call}</tool_call>", tools=TOOLS, max_output_tokens=limit)
    assert found[-1]["type"] == "response.incomplete"  # with 58 tokens within the closing mark
    assert [item["status"] for item in found[-1]["response"]["output"]] == [status]


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


PATCH = '*** Begin Patch\n+"ü"\n*** End Patch'
GRAMMAR = "start: begin hunk end"
#: What Codex offers a model when nothing is set: functions, a tool that takes plain text, and several that only
#: OpenAI's own servers run.
CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "description": "Runs a command.",
         "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}},
        {"type": "function", "name": "update_plan", "strict": False, "parameters": {"type": "object"}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
        {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}},
        {"type": "namespace", "name": "agents", "description": "Other agents.",
         "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": {"type": "object"}}]},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}, "prompt_cache_key": "k",
    "client_metadata": {"a": "b"}, "service_tier": "auto",
}  # fmt: skip


def test_the_tools_that_codex_offers_by_default(scripted: RunningServer) -> None:
    """The model hears of those that the client runs; a call with plain text comes back as one."""
    call = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}})
    found = events(scripted, input=f"rate=900 say:<tool_call>{call}</tool_call>", **CODEX)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    (item,) = found[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert found[3]["delta"] == found[4]["input"] == PATCH
    assert found[5]["item"] == item and "arguments" not in item
    assert found[3]["item_id"] == found[2]["item"]["id"] == item["id"]


def test_tools_that_nobody_here_runs_are_not_shown_to_the_model() -> None:
    described = {tool.function.name: tool.function for tool in chat_tools(CODEX["tools"])}
    assert list(described) == ["exec_command", "update_plan", "apply_patch", "spawn"]
    patch = described["apply_patch"]
    assert patch.parameters is not None and patch.parameters["required"] == ["input"]
    assert (
        patch.description is not None and "Edits files." in patch.description and GRAMMAR in patch.description
    )


def test_a_call_with_plain_text_and_its_result_are_rendered() -> None:
    items = [
        {"type": "message", "role": "user", "content": "Go."},
        {
            "type": "custom_tool_call",
            "call_id": "c7",
            "name": "apply_patch",
            "input": PATCH,
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c7", "output": "Done!"},
    ]
    chat = to_chat(ResponsesRequest(input=items, tools=CODEX["tools"]))
    (call,) = chat.messages[1]["tool_calls"]
    assert call["id"] == "c7" and json.loads(call["function"]["arguments"]) == {"input": PATCH}
    assert chat.messages[2] == {"role": "tool", "tool_call_id": "c7", "content": "Done!"}


def test_a_forced_call_with_plain_text(scripted: RunningServer) -> None:
    body = {"input": "say:no", "temperature": 0, "max_output_tokens": 60, **CODEX}
    choice = {"type": "custom", "name": "apply_patch"}
    response = scripted.post("/v1/responses", {**body, "tool_choice": choice}).json()
    assert [item["type"] for item in response["output"]] == ["custom_tool_call"]


@pytest.mark.parametrize("arguments", ['{"input": "cut o', '{"patch": "x"}', '["input"]', '{"input": 3}'])
def test_arguments_without_the_text_are_given_as_they_are(arguments: str) -> None:
    assert text_in(arguments) == arguments
