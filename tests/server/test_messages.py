"""/v1/messages as agents use it: what becomes of its blocks, and the whole set of events."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from monotape.server.requests.anthropic import (
    InputMessage,
    InputTool,
    MessagesRequest,
    OutputFormat,
    Thinking,
    ToolChoice,
    to_chat,
)
from server.running import RunningServer

TOOL = {"name": "f", "input_schema": {"type": "object"}}


def test_blocks_become_messages() -> None:
    request = MessagesRequest(
        max_tokens=5,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: 9"},
            {"type": "text", "text": "Be brief."},
        ],
        messages=[
            InputMessage("user", "Go."),
            InputMessage(
                "assistant",
                [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Well."},
                    {"type": "tool_use", "id": "toolu_abcdefgh9", "name": "f", "input": {"a": "ü"}},
                ],
            ),
            InputMessage(
                "user",
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_abcdefgh9",
                        "content": [{"type": "text", "text": "12"}],
                    },
                    {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
                ],
            ),
        ],
        tools=[InputTool("f")],
        stop_sequences=["END"],
        thinking=Thinking("enabled", 1024),
    )
    chat = to_chat(request)
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "user"]
    assert chat.messages[0]["content"] == "Be brief."
    assert chat.messages[2] == {
        "role": "assistant", "content": "Well.", "reasoning_content": "hm",
        "tool_calls": [{"id": "abcdefgh9", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}],
    }  # fmt: skip
    assert chat.messages[3] == {"role": "tool", "tool_call_id": "abcdefgh9", "content": "12"}
    assert chat.messages[4]["content"] == "And?"
    assert chat.stop == ["END"] and chat.max_tokens == 5 and chat.reasoning_effort is None
    assert (
        to_chat(MessagesRequest(max_tokens=1, messages=[InputMessage("user", "x")])).reasoning_effort
        == "none"
    )


def test_an_answer_that_the_client_has_begun_goes_on(scripted: RunningServer) -> None:
    def tokens(*said: dict[str, Any]) -> int:
        body = {"messages": [{"role": "user", "content": "x"}, *said]}
        counted: int = scripted.post("/v1/messages/count_tokens", body).json()["input_tokens"]
        return counted

    begun = {"role": "assistant", "content": "{"}
    assert tokens(begun) == tokens() + 1  # the turn neither ends nor begins again
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    for content in (" ", [{"type": "text", "text": "Well."}, call]):
        assert not to_chat(
            MessagesRequest(max_tokens=1, messages=[InputMessage("assistant", content)])
        ).continue_final_message


@pytest.mark.parametrize(
    "whole",
    [
        {"tool_choice": ToolChoice("any")},
        {"tool_choice": ToolChoice("tool", "f")},
        {"output_format": OutputFormat("json_schema", {"type": "object"})},
    ],
)
def test_a_call_or_an_object_that_must_come_is_not_the_rest_of_an_answer(whole: dict[str, Any]) -> None:
    """gpt-oss wrote the call into the message that was begun, where the parser takes it for text."""
    begun = [InputMessage("user", "x"), InputMessage("assistant", "I look.")]
    tools = [InputTool("f")]
    assert not to_chat(
        MessagesRequest(max_tokens=1, messages=begun, tools=tools, **whole)
    ).continue_final_message
    assert to_chat(MessagesRequest(max_tokens=1, messages=begun, tools=tools)).continue_final_message


def test_a_stream_of_thoughts_text_and_a_call(scripted: RunningServer) -> None:
    text = 'rate=900 say:<think>hm</think>Well.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    body: dict[str, Any] = {
        "max_tokens": 200,
        "temperature": 0,
        "messages": [{"role": "user", "content": text}],
        "tools": [TOOL],
    }
    plain = scripted.post("/v1/messages", body).json()
    assert [block["type"] for block in plain["content"]] == ["thinking", "text", "tool_use"]
    assert plain["content"][2]["input"] == {"a": 1} and plain["stop_reason"] == "tool_use"
    sent = scripted.post("/v1/messages", {**body, "stream": True}).text.strip().split("\n\n")
    events = [event for event in sent if not event.startswith(":")]  # a slow machine has comments of progress
    datas = [json.loads(event.partition("data: ")[2]) for event in events]
    assert [event.split("\n")[0] for event in events] == [f"event: {data['type']}" for data in datas]
    started = [data["content_block"]["type"] for data in datas if data["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use"]
    deltas = [data["delta"] for data in datas if data["type"] == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"a": 1}'
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert "".join(delta.get("text", "") for delta in deltas) == "Well."
    assert datas[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert datas[-2]["usage"]["output_tokens"] == plain["usage"]["output_tokens"]
    assert datas[-1] == {"type": "message_stop"}


#: What Claude Code sends when nothing is set, in little: blocks to cache, a way to think, fields for Anthropic alone.
CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 300, "temperature": 1, "stream": True, "metadata": {"user_id": "u"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": {"$schema": "x", "type": "object", "properties": {}}},
        {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}, "eager_input_streaming": True,
         "cache_control": {"type": "ephemeral"}},
    ],
}  # fmt: skip


def test_a_request_of_claude_code_with_its_defaults(scripted: RunningServer) -> None:
    text = 'say:<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>'
    messages = [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>x</system-reminder>"},
            {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    response = scripted.post("/v1/messages?beta=true", {**CLAUDE_CODE, "messages": messages})
    assert response.status_code == 200, response.text
    assert '"stop_reason":"tool_use"' in response.text and '"name":"Bash"' in response.text
    counted = {name: CLAUDE_CODE[name] for name in ("system", "tools", "thinking")}
    response = scripted.post("/v1/messages/count_tokens?beta=true", {**counted, "messages": messages})
    assert response.json()["input_tokens"] > 20


def test_a_search_that_only_anthropic_runs_is_refused_by_name(scripted: RunningServer) -> None:
    """Claude Code asks for one in a request of its own: an error tells it, a made-up answer would not."""
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    messages = [{"role": "user", "content": "say:x"}]
    response = scripted.post("/v1/messages", {"max_tokens": 9, "messages": messages, "tools": tools})
    assert response.status_code == 400
    assert "does not run 'web_search_20250305' tools" in response.json()["error"]["message"]


def test_a_prompt_that_does_not_fit_is_named_as_anthropic_does(scripted: RunningServer) -> None:
    """Claude Code reads both numbers off this sentence and compacts the conversation."""
    for text, least in (("tape" * 30_000, ""), ("x" * 4_000_000, "at least ")):
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": text}]}
        response = scripted.post("/v1/messages", body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert re.fullmatch(rf"prompt is too long: {least}\d+ tokens > 19999 maximum", error["message"]), (
            error
        )
        openai = scripted.post("/v1/chat/completions", {"messages": body["messages"]}).json()["error"]
        assert openai["message"].startswith("This model's maximum context length is 20000 tokens.")


def test_an_answer_longer_than_the_context_ends_with_it(scripted: RunningServer) -> None:
    """Anthropic's API takes any max_tokens if the prompt fits, and says where the context ended the answer."""
    room = 12
    used = scripted.post(
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "say:"}]}
    ).json()
    per = (
        scripted.post("/tokenize", {"prompt": "ab" * 100, "add_special_tokens": False}).json()["count"] / 100
    )
    text = "say:" + "ab" * int((20_000 - used["input_tokens"] - room) / per)
    body: dict[str, Any] = {
        "max_tokens": 32_000,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
    }
    count = scripted.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert 19_900 < count < 20_000
    whole = scripted.post("/v1/messages", body).json()
    assert whole["stop_reason"] == "model_context_window_exceeded"
    assert whole["usage"]["output_tokens"] == 20_000 - count
    streamed = scripted.post("/v1/messages", {**body, "stream": True}).text
    assert '"stop_reason":"model_context_window_exceeded"' in streamed
    short = scripted.post("/v1/messages", {**body, "max_tokens": 3}).json()
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 3)
    done = {"max_tokens": 32_000, "messages": [{"role": "user", "content": "say:short"}]}
    assert scripted.post("/v1/messages", done).json()["stop_reason"] == "end_turn"
    refused = scripted.post("/v1/chat/completions", {"max_tokens": 32_000, "messages": body["messages"]})
    assert refused.status_code == 400  # OpenAI's interface says what does not fit
