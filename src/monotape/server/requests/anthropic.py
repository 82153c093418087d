"""The body of Anthropic's messages, and the chat request that it is here."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from monotape.server.api_error import ApiError, bad_request, unsupported
from monotape.server.requests.chat_parts import call, named, result, schema_format
from monotape.server.requests.openai import ChatRequest, FunctionTool, Positive, Real, Tool

_BILLING = "x-anthropic-billing-header"  # changes with every request, and would defeat prefix reuse


class InputTool(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str  # "disabled", or one of the ways to think
    budget_tokens: Positive | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: str | None = None


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=10_000)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Positive
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its name before output_config
    mcp_servers: list[Any] | None = None
    container: Any = None


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """The same conversation in OpenAI's terms."""
    messages: list[dict[str, Any]] = []
    if system := _system(request.system):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}]")
    choice = request.tool_choice
    chat = ChatRequest(
        messages=messages,
        model=request.model,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort="none" if request.thinking is None or request.thinking.type == "disabled" else None,
        # A call that must come, or an object, is whole: it is no rest of what was begun.
        continue_final_message=_is_begun(messages[-1]) and _choice(choice) in (None, "auto", "none"),
    )
    if isinstance(request, MessagesRequest):
        _refuse(request)
        chat.max_tokens, chat.stop = request.max_tokens, request.stop_sequences
        config = request.output_config or OutputConfig()
        chat.reasoning_effort = chat.reasoning_effort or config.effort
        wanted = config.format or request.output_format
        if wanted is not None:
            chat.response_format, chat.continue_final_message = schema_format(wanted.schema), False
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    return chat


def _is_begun(last: dict[str, Any]) -> bool:
    """Whether the last message is the beginning of the answer, written by the client: the model continues it."""
    return last["role"] == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last


def _refuse(request: MessagesRequest) -> None:
    if request.mcp_servers:
        raise unsupported("mcp_servers", "this server runs no tools of its own.")
    if request.container is not None:
        raise unsupported("container", "this server runs no code.")


def _system(system: str | list[dict[str, Any]] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n\n".join(_text(block, "system") for block in system if not is_billing(block))


def is_billing(block: Any) -> bool:
    """Whether it is the block by which Claude Code's requests are billed; no model should read it."""
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    return isinstance(text, str) and text.startswith(_BILLING)


def _text(block: dict[str, Any], where: str) -> str:
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    raise ApiError(
        400, f"{where} has a block of the type {str(block.get('type'))[:60]!r}. This model reads text only.",
        code="unsupported_content", param=where.partition("[")[0],
    )  # fmt: skip


def _messages(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """One message can hold the results of several tools, which are messages of their own here."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, thoughts = [], [], [], []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_result":
            results.append(_result(block, where))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, where))
    said: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if calls:
        said["tool_calls"] = calls
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    return [*results, *([said] if texts or calls or thoughts or not results else [])]


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(_text(part, where) for part in content if isinstance(part, dict))
    if content is not None and not isinstance(content, str):
        raise bad_request(f"{where} has a tool_result whose content is no text.", "messages", "invalid_value")
    return result(_call_id(block.get("tool_use_id")), content or "")


def _call_id(given: Any) -> str:
    """As the model's template knows it: the prefix was put there for Anthropic's clients."""
    return str(given or "").removeprefix("toolu_")


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise bad_request(f"{where} has a tool_use without a name.", "messages", "invalid_value")
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    return call(_call_id(block.get("id")), block["name"], arguments)


def _tool(tool: InputTool) -> Tool:
    if tool.input_schema is None and tool.type not in (None, "custom"):
        raise unsupported("tools", f"this server does not run '{str(tool.type)[:60]}' tools.")
    return Tool(
        "function", FunctionTool(tool.name, tool.description, tool.input_schema or {"type": "object"})
    )


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice has the type 'tool' but no name.", "tool_choice", "invalid_value")
        return named(choice.name)
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
