"""The body of OpenAI's responses, and the chat request that it is here."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from monotape.server.api_error import bad_request, unsupported
from monotape.server.requests.chat_parts import call, named, result, schema_format
from monotape.server.requests.openai import ChatRequest, Positive, Real, Reasoning, ResponseFormat
from monotape.server.requests.responses_tools import chat_tools, text_arguments


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ChosenTool(msgspec.Struct):
    type: str
    name: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses"""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Positive | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tool_calls: int | None = None


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """The same conversation as a chat."""
    _refuse(request)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for index, item in enumerate(request.input):
            _add(messages, item, f"input[{index}]")
    return ChatRequest(
        messages=messages,
        model=request.model,
        tools=chat_tools(request.tools) or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=_format(request.text),
        reasoning=request.reasoning,
        verbosity=None if request.text is None else request.text.verbosity,
    )


def _refuse(request: ResponsesRequest) -> None:
    stateless = "this server keeps no responses; send the whole conversation as input."
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise unsupported(name, stateless)
    if request.background:
        raise unsupported("background", stateless)
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation", "nothing is cut out of a conversation.")
    if request.top_logprobs:
        raise unsupported("top_logprobs", "use /v1/chat/completions for log-probabilities.")


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _say(messages, item)
    elif kind in ("function_call", "custom_tool_call"):
        given = (
            item.get("arguments") or "{}" if kind == "function_call" else text_arguments(item.get("input"))
        )
        made = call(item.get("call_id"), item.get("name"), given)
        _assistant(messages).setdefault("tool_calls", []).append(made)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        content = output if isinstance(output, str | list) else json.dumps(output, ensure_ascii=False)
        messages.append(result(item.get("call_id"), content))
    elif kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise bad_request(
                f"{where} has reasoning whose content is no list of parts.", "input", "invalid_value"
            )
        thought = "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
        if thought:
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    else:
        raise bad_request(
            f"{where} has the type {str(kind)[:60]!r}, which is not supported.", "input", "invalid_value"
        )


def _say(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Adds what was said; an assistant's words belong to the turn that its thoughts have begun."""
    said = {"role": item.get("role"), "content": item.get("content")}
    last = messages[-1] if messages else {}
    only_thought = last.get("content") is None and "reasoning_content" in last and "tool_calls" not in last
    if said["role"] == "assistant" and only_thought:
        last.update(said)
    else:
        messages.append(said)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The turn that a call belongs to: text, thoughts and calls come as items of their own."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _choice(choice: str | ChosenTool | None) -> Any:
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, ChosenTool) and choice.type in ("function", "custom") and choice.name:
        return named(choice.name)
    shown = choice if isinstance(choice, str) else choice.type
    raise bad_request(f"tool_choice is {shown[:60]!r}.", "tool_choice", "invalid_value")


def _format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    wanted = text.format
    if wanted.type == "json_schema":
        return schema_format(wanted.schema)
    return ResponseFormat(wanted.type, schema=wanted.schema)
