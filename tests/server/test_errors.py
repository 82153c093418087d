"""Every error that a client can meet: its status, type, code, param and wording."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.running import RunningServer
from waiting import PATIENCE_S

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HI = [{"role": "user", "content": "say:hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}

#: path, body, code, param, a part of the message
REFUSED: list[tuple[str, Any, str | None, str | None, str]] = [
    (CHAT, {}, "invalid_value", None, "missing required field 'messages'"),
    (CHAT, {"messages": []}, "invalid_value", "messages", "length >= 1"),
    (CHAT, {"messages": "hi"}, "invalid_value", "messages", "Expected 'array', got 'str'"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages", "has the role 'robot'"),
    (CHAT, {"messages": [{"content": "x"}]}, "invalid_value", "messages", "has the role 'None'"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "invalid_value", "messages", "neither text nor a list"),
    (CHAT, {"messages": IMAGE}, "unsupported_content", "messages", "'image_url'. This model reads text only."),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}, *HI], "tools": [TOOL]},
     "invalid_value", "messages", "messages[0].tool_calls is not a list of calls."),
    (CHAT, {"messages": HI, "max_tokens": 0}, "invalid_value", "max_tokens", ">= 1"),
    (CHAT, {"messages": HI, "max_tokens": 2**40}, "invalid_value", "max_tokens", "<= 2147483647"),
    (CHAT, {"messages": HI, "max_tokens": "many"}, "invalid_value", "max_tokens", "Expected 'int | null', got 'str'"),
    (CHAT, {"messages": HI, "temperature": -1}, None, "temperature", "temperature is -1"),
    (CHAT, {"messages": HI, "temperature": 1e9}, "invalid_value", "temperature", "<= 1000000.0"),
    (CHAT, {"messages": HI, "top_p": 0}, None, "top_p", "It must be a number from 1e-06 to 1."),
    (CHAT, {"messages": HI, "n": 17, "temperature": 1}, "invalid_value", "n", "n is 17. It must be from 1 to 16."),
    (CHAT, {"messages": HI, "seed": 2**64}, "invalid_value", "seed", "<="),
    (CHAT, {"messages": HI, "stop": ["x"] * 65}, None, "stop", "at most 64 strings"),
    (CHAT, {"messages": HI, "stop": [""]}, None, "stop", "1 to 1024 characters"),
    (CHAT, {"messages": HI, "logit_bias": {"x": 1}}, None, "logit_bias", "each key"),
    (CHAT, {"messages": HI, "logit_bias": {"9" * 5000: 1}}, None, "logit_bias", "each key"),
    (CHAT, {"messages": HI, "logit_bias": {"99999": 1}}, None, None, "not in the vocabulary"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, "invalid_value", "top_logprobs", "needs logprobs to be true"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs", "<= 20"),
    (CHAT, {"messages": HI, "functions": [{}]}, "unsupported_parameter", "functions", "use tools."),
    (CHAT, {"messages": HI, "modalities": ["audio"]}, "unsupported_parameter", "modalities", 'only ["text"] is.'),
    (CHAT, {"messages": HI, "truncate_prompt_tokens": 5},
     "unsupported_parameter", "truncate_prompt_tokens", "cut off silently"),
    (CHAT, {"messages": HI, "bad_words": ["x"]}, "unsupported_parameter", "bad_words", "use logit_bias"),
    (CHAT, {"messages": HI, "echo": True}, "unsupported_parameter", "echo", "continue_final_message"),
    (CHAT, {"messages": HI, "use_beam_search": True},
     "unsupported_parameter", "use_beam_search", "this server samples"),
    (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"},
     "unsupported_parameter", "chat_template", "--trust-request-chat-template"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}},
     "invalid_value", "messages", "may not set 'messages'"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "invalid_value", "tool_choice", "tool_choice needs tools."),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": "a"}], "tools": [TOOL], "tool_choice": "required",
            "continue_final_message": True, "add_generation_prompt": False},
     None, "tool_choice", "continue_final_message and a forced tool_choice"),
    (CHAT, {"messages": HI, "tool_choice": "maybe"}, "invalid_value", "tool_choice", "Invalid enum value"),
    (CHAT, {"messages": HI, "tools": [{"type": "magic"}]},
     "invalid_value", "tools[0].type", "Invalid enum value 'magic'"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "invalid_value", "tool_choice", "names 'g', which is not in tools"),
    (CHAT, {"messages": HI, "response_format": {"type": "yaml"}}, "invalid_value", "response_format.type", "'yaml'"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}},
     "invalid_value", "response_format", "no json_schema.schema"),
    (CHAT, {"messages": HI, "response_format": BAD_SCHEMA},
     "invalid_value", "response_format", "Invalid type: nonsense. JSON schemas have the types null, boolean, object, "),
    (CHAT, {"messages": HI, "tool_choice": "required", "tools": [BAD_TOOL]},
     "invalid_value", "tools", "Invalid type: nonsense. JSON schemas have the types"),
    (CHAT, {"messages": HI, "structured_outputs": {"regex": "[a-"}},
     "invalid_value", "structured_outputs", "regular expression"),
    (CHAT, {"messages": HI, "structured_outputs": {}}, "invalid_value", "structured_outputs", "has 0 constraints"),
    (CHAT, {"messages": HI, "structured_outputs": {"regex": "a", "choice": ["b"]}},
     "invalid_value", "structured_outputs", "has 2"),
    (CHAT, {"messages": HI, "guided_json": "{"}, "invalid_value", "guided_json", "is not JSON"),
    (CHAT, {"messages": HI, "guided_regex": "a", "response_format": {"type": "json_object"}},
     "invalid_value", "response_format", "more than one way"),
    (CHAT, {"messages": HI, "max_tokens": 30_000}, "context_length_exceeded", "messages",
     "This model's maximum context length is 20000 tokens. However, you requested 30000 output tokens and your prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 30_000}]},
     "context_length_exceeded", "messages", "However, your prompt contains 30"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 2_000_000}]},
     "context_length_exceeded", "messages", "at least"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "unsupported_parameter", "suffix", "no fill-in-the-middle tokens"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y", "echo": True}, "invalid_value", "echo", "exclude each other"),
    (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt", "length >= 1"),
    (COMPLETIONS, {"prompt": ""}, None, "prompt", "The prompt is empty"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "invalid_value", "prompt", "mixes"),
    (COMPLETIONS, {"prompt": [99999]}, "invalid_value", "prompt", "Token id 99999 is not in the vocabulary"),
    (COMPLETIONS, {"prompt": [-1]}, "invalid_value", "prompt[0]", ">= 0"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "invalid_value", "max_tokens", "at least 1 unless echo"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}, "unsupported_parameter", "best_of", "n completions"),
    (COMPLETIONS, {"prompt": ["x"] * 257}, None, "prompt", "at most 256"),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"},
     "unsupported_parameter", "previous_response_id", "keeps no responses"),
    (RESPONSES, {"input": "x", "background": True}, "unsupported_parameter", "background", "keeps no responses"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "invalid_value", "input", "'item_reference'"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 5}]}, "invalid_value", "input", "no list of parts"),
    (RESPONSES, {"input": "x", "tools": [{"type": "computer"}]},
     "unsupported_parameter", "tools", "only functions and custom tools are, not 'computer'"),
    (RESPONSES, {"input": "x", "tools": [{"type": "custom"}]}, "invalid_value", "tools", "missing required field"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"},
     "invalid_value", "tool_choice", "tool_choice needs tools."),
    (RESPONSES, {"input": "x", "truncation": "auto"}, "unsupported_parameter", "truncation", "nothing is cut out"),
    ("/tokenize", {}, "invalid_value", "prompt", "either prompt or messages"),
    ("/detokenize", {"tokens": [99999]}, "invalid_value", "tokens", "not in the vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "code", "param", "words"), REFUSED)
def test_a_bad_request(
    scripted: RunningServer, path: str, body: Any, code: str | None, param: str | None, words: str
) -> None:
    response = scripted.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (code, param), error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "missing required field"),
        ({"messages": HI}, "missing required field 'max_tokens'"),
        ({"messages": HI, "max_tokens": 5, "mcp_servers": [{}]}, "mcp_servers is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5},
            "reads text only",
        ),
        ({"messages": HI, "max_tokens": 5, "tools": [{"type": "bash_1", "name": "bash"}]}, "'bash_1' tools"),
        ({"messages": HI, "max_tokens": 5, "tool_choice": {"type": "tool"}}, "no name"),
    ],
)
def test_anthropic_errors_have_their_own_shape(scripted: RunningServer, body: Any, words: str) -> None:
    response = scripted.post(MESSAGES, body)
    assert response.status_code == 400
    answer = response.json()
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_an_unknown_model_is_404(scripted: RunningServer, path: str) -> None:
    given = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}
    response = scripted.post(path, {**given[path], "model": "gpt-5"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    assert error["message"].startswith("The model 'gpt-5' does not exist. Served: scripted. Start the server")
    assert scripted.get("/v1/models/gpt-5").status_code == 404
    anthropic = scripted.post(MESSAGES, {"messages": HI, "model": "gpt-5", "max_tokens": 1})
    assert anthropic.status_code == 404 and anthropic.json()["error"]["type"] == "not_found_error"


def test_unknown_routes_and_methods(scripted: RunningServer) -> None:
    missing = scripted.get("/v2/everything")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    assert missing.json()["error"]["message"] == "There is no route GET /v2/everything."
    wrong = scripted.get(CHAT)
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"{" * 100_000]
)
def test_what_is_not_json_is_400(scripted: RunningServer, body: bytes) -> None:
    response = httpx.post(scripted.url + CHAT, content=body, timeout=PATIENCE_S)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["code"] in ("invalid_json", "invalid_value")


def test_a_body_that_is_too_large_is_413(scripted: RunningServer) -> None:
    announced = httpx.post(scripted.url + CHAT, content=b"x" * (17 << 20), timeout=PATIENCE_S)
    assert announced.status_code == 413
    assert announced.json()["error"]["code"] == "request_too_large"


def test_a_fault_of_the_model_is_500_and_ends_a_stream_with_an_error(scripted: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "fault say:abcdef"}]}
    plain = scripted.post(CHAT, body)
    assert plain.status_code == 500
    assert (
        plain.json()["error"]["code"] == "model_fault" and "not numbers" in plain.json()["error"]["message"]
    )
    streamed = scripted.post(CHAT, {**body, "stream": True}).text
    assert '"error":{"message":"The logits at position 3 are not numbers."' in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    messages = scripted.post(MESSAGES, {**body, "stream": True, "max_tokens": 9}).text
    assert "event: error\n" in messages and '"type":"api_error"' in messages
    responses = scripted.post(RESPONSES, {"input": "fault say:abcdef", "stream": True}).text
    assert "event: response.failed\n" in responses
    assert scripted.say("say:still here") == "still here"
