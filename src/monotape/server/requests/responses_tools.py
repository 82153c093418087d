"""The tools of the Responses API: functions, functions in namespaces, and custom ones, whose input is plain text.

To the model a custom tool is a function with one text, since that is what templates can describe. Tools that OpenAI's
own servers run are left out: agents offer them by default and do without.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from monotape.server.api_error import bad_request, unsupported
from monotape.server.requests.openai import FunctionTool, Tool

LOG = logging.getLogger("monotape.server")
#: By how their types begin; dates follow some of them.
_HOSTED = ("web_search", "image_generation", "code_interpreter", "file_search", "tool_search")
_TEXT = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
    "additionalProperties": False,
}  # fmt: skip


class CustomFormat(msgspec.Struct):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


def chat_tools(tools: list[dict[str, Any]] | None) -> list[Tool]:
    """The tools that the model is offered."""
    return [Tool("function", _function(tool)) for tool, _ in _flat(tools) if _is_for_the_model(tool)]


def namespaces(tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """The namespace of each function that has one: a call must name it."""
    return {str(tool.get("name")): space for tool, space in _flat(tools) if space is not None}


def custom_names(tools: list[dict[str, Any]] | None) -> frozenset[str]:
    """The tools whose calls carry text."""
    return frozenset(str(tool.get("name")) for tool, _ in _flat(tools) if tool.get("type") == "custom")


def text_in(arguments: str) -> str:
    """The text of a custom call. Arguments that were cut off, or have another shape, are given as they are."""
    try:
        found = json.loads(arguments)["input"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return arguments
    return found if isinstance(found, str) else arguments


def is_whole(arguments: str) -> bool:
    """Whether a call's arguments have come to their end. The answer may have been cut off after them."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def text_arguments(text: Any) -> str:
    """The arguments that a custom call had for the model."""
    return json.dumps({"input": text if isinstance(text, str) else ""}, ensure_ascii=False)


def _flat(
    tools: list[dict[str, Any]] | None, space: str | None = None
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Every tool, with the namespace that it is in."""
    for tool in tools or []:
        if tool.get("type") != "namespace":
            yield tool, space
            continue
        listed = tool.get("tools")
        inner = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        yield from _flat([item for item in inner if item.get("type") != "namespace"], str(tool.get("name")))


def _is_for_the_model(tool: dict[str, Any]) -> bool:
    kind = str(tool.get("type"))
    if kind.startswith(_HOSTED):
        LOG.warning("The model is not told of the tool '%s': this server does not run it.", kind[:60])
        return False
    if kind not in ("function", "custom"):
        raise unsupported("tools", f"only functions and custom tools are, not {kind[:60]!r}.")
    return True


def _function(tool: dict[str, Any]) -> FunctionTool:
    try:
        if tool["type"] == "function":
            return msgspec.convert(tool, FunctionTool)
        custom = msgspec.convert(tool, CustomTool)
        return msgspec.convert(
            {"name": custom.name, "description": _described(custom), "parameters": _TEXT}, FunctionTool
        )
    except msgspec.ValidationError as error:
        raise bad_request(f"A tool is not valid: {error}.", "tools", "invalid_value") from None


def _described(tool: CustomTool) -> str:
    said = tool.description or ""
    if tool.format is None or not tool.format.definition:
        return said
    return f"{said}\n\nThe input has this form ({tool.format.syntax or 'grammar'}):\n{tool.format.definition}".strip()
