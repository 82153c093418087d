"""The body of OpenAI's responses, and the chat request that it is here."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from monotape.server.api_error import bad_request, unsupported
from monotape.server.requests import (
    ChatRequest,
    FunctionTool,
    JsonSchema,
    NamedFunction,
    NamedTool,
    Positive,
    Real,
    ResponseFormat,
    Tool,
)

LOG = logging.getLogger("monotape.server")
#: Tools that OpenAI's own servers run. The model is not told of them; what it can do without them is the client's risk.
_HOSTED = ("web_search", "web_search_preview", "image_generation", "code_interpreter", "file_search")


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


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
        tools=_tools(request.tools) or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=_format(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
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
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str | list) else json.dumps(output, ensure_ascii=False)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        thought = "".join(
            str(part.get("text") or "") for part in item.get("content") or [] if isinstance(part, dict)
        )
        if thought:
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    else:
        raise bad_request(
            f"{where} has the type {str(kind)[:60]!r}, which is not supported.", "input", "invalid_value"
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The turn that a call belongs to: text, thoughts and calls come as items of their own."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def namespaces(tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """The namespace of each function that has one: a call must name it."""
    return {
        str(inner.get("name")): str(tool.get("name"))
        for tool in tools or []
        if tool.get("type") == "namespace"
        for inner in _inner(tool)
    }


def _inner(tool: dict[str, Any]) -> list[dict[str, Any]]:
    listed = tool.get("tools")
    return [inner for inner in listed if isinstance(inner, dict)] if isinstance(listed, list) else []


def _tools(tools: list[dict[str, Any]] | None) -> list[Tool]:
    found = []
    for tool in tools or []:
        kind = tool.get("type")
        if kind == "namespace":
            found += _tools(_inner(tool))
            continue
        if kind in _HOSTED:
            LOG.warning("The model is not told of the tool '%s': this server does not run it.", kind)
            continue
        if kind != "function":
            raise unsupported("tools", f"only functions are, not {str(kind)[:60]!r}.")
        try:
            function = msgspec.convert(tool, FunctionTool)
        except msgspec.ValidationError as error:
            raise bad_request(f"A tool is not valid: {error}.", "tools", "invalid_value") from None
        found.append(Tool("function", function))
    return found


def _choice(choice: str | ChosenTool | None) -> Any:
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, ChosenTool) and choice.type == "function" and choice.name:
        return NamedTool("function", NamedFunction(choice.name))
    shown = choice if isinstance(choice, str) else choice.type
    raise bad_request(f"tool_choice is {shown[:60]!r}.", "tool_choice", "invalid_value")


def _format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    wanted = text.format
    return ResponseFormat(wanted.type, JsonSchema(wanted.name, wanted.schema, wanted.strict))
