"""A request's tools: which of them the model is offered, how it writes a call, and when it must."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from monotape.errors import RequestError
from monotape.server.api_error import bad_request
from monotape.server.conversation.tool_formats import HARMONY, HERMES, ToolFormat
from monotape.server.grammar.definition import Grammar, from_channels, from_tool
from monotape.server.requests.openai import ChatRequest, NamedTool, Tool
from monotape.server.requests.structured import Asked


@dataclass(frozen=True, slots=True)
class Tools:
    """What of a request's tools is in force."""

    described: list[dict[str, Any]]  # for the template
    style: ToolFormat | None  # None: calls are not looked for
    forced: Asked | None = None  # when one must be called


def tools_of(request: ChatRequest, style: ToolFormat) -> Tools:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools.", "tool_choice", "invalid_value")
        return Tools([], None)
    if choice == "none":
        return Tools([], None)
    described = [_described(tool) for tool in request.tools]
    offered = {tool.function.name: tool.function.parameters for tool in request.tools}
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in offered:
            raise bad_request(
                f"tool_choice names '{name}', which is not in tools.", "tool_choice", "invalid_value"
            )
        offered = {name: offered[name]}
    elif choice != "required":
        return Tools(described, style)
    if style is HARMONY:
        return Tools(described, style, _asked(lambda: from_channels(offered)))
    style = (
        HERMES if style.xml else style
    )  # values between tags have no grammar; this model reads JSON as well
    return Tools(described, dataclasses.replace(style, bare=True), _forced(style, offered))


def _described(tool: Tool) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(tool)
    shown["function"] = {name: value for name, value in shown["function"].items() if value is not None}
    return shown


def _forced(style: ToolFormat, offered: dict[str, Any]) -> Asked:
    """A call of one of these. Marks that are special tokens are left out: the grammar alone makes it a call."""
    begin, end = ("", "") if style.special else (style.begins[0] + "\n", "\n" + style.ends)
    return _asked(lambda: from_tool(begin, "name", style.arguments_key, end, offered))


def _asked(make: Callable[[], Grammar]) -> Asked:
    try:
        return Asked("tools", make())
    except RequestError as error:
        raise bad_request(f"{error.message} {error.hint}", "tools", "invalid_value") from None
