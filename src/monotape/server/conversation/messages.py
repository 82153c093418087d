"""The messages of a chat, checked, in the form that templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monotape.server.api_error import ApiError, bad_request

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def read_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text for content. Where a client begins with several system messages they become one: most
    templates know only one.
    """
    messages = [_message(message, index) for index, message in enumerate(given)]
    first = next(
        (index for index, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    if first < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:first])
    return [{**messages[0], "content": text}, *messages[first:]]


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message with the roles that templates know, and reasoning under both of its names."""
    role = message.get("role")
    if role not in _ROLES:
        raise bad_request(
            f"messages[{index}] has the role {str(role)[:60]!r}. Known: {', '.join(_ROLES)}.",
            "messages",
            "invalid_value",
        )
    checked = dict(message)
    if role == "developer":
        checked["role"] = "system"
    content = message.get("content")
    if not isinstance(content, str):
        checked["content"] = _text(content, f"messages[{index}]")
    if role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            checked["reasoning_content"] = checked["reasoning"] = thought
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise bad_request(
            f"messages[{index}].tool_calls is not a list of calls.", "messages", "invalid_value"
        )
    return checked


def _is_call(call: Any) -> bool:
    """Templates read the function's fields; one that is missing or null is left to them."""
    return isinstance(call, dict) and isinstance(call.get("function") or {}, dict)


def _text(content: Any, where: str) -> str:
    """The text of a message that has none, or has it in parts. Pictures and sounds are refused, not dropped."""
    if content is None:
        return ""
    if not isinstance(content, list):
        raise bad_request(
            f"{where} has content that is neither text nor a list of parts.", "messages", "invalid_value"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        value = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(value, str):
            raise ApiError(
                400, f"{where} has a part of the type {str(kind)[:60]!r}. This model reads text only.",
                code="unsupported_content", param="messages",
            )  # fmt: skip
        texts.append(value)
    return "\n".join(texts)
