"""Parts of a chat that the other interfaces bring in words of their own: calls, their results, tools and choices."""

from __future__ import annotations

from typing import Any

from monotape.server.requests.openai import JsonSchema, NamedFunction, NamedTool, ResponseFormat


def call(call_id: Any, name: Any, arguments: str) -> dict[str, Any]:
    """A call that an assistant has made; `arguments` is JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: Any, content: Any) -> dict[str, Any]:
    """What came of a call, as a message of its own."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def named(name: str) -> NamedTool:
    """The choice of one tool."""
    return NamedTool("function", NamedFunction(name))


def schema_format(schema: dict[str, Any] | bool | None) -> ResponseFormat:
    """An answer that obeys a JSON schema."""
    return ResponseFormat("json_schema", JsonSchema(schema=schema))
