"""How model families write tool calls, and which of the ways a model's template speaks of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write a call."""

    name: str
    begins: tuple[str, ...]  # marks that announce a call
    ends: str  # mark after it, "" for none
    arguments_key: str
    skips: str = " \t\r\n"  # characters that may stand between the mark and the call
    separators: str = ""  # and between two calls
    bare: bool = False  # an answer that starts with an object is a call without a mark
    named: bool = False  # name[ARGS]{...} is a call too
    short_ids: bool = False
    xml: bool = False  # calls are tags, not JSON
    special: bool = False  # the marks are special tokens, which must not be left out of the text


HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>", "arguments")
LLAMA3 = ToolFormat(
    "llama3_json", ("<|python_tag|>",), "", "parameters", separators=";", bare=True, special=True
)
MISTRAL = ToolFormat(
    "mistral", ("[TOOL_CALLS]",), "", "arguments", skips=" \t\r\n[", separators=",]", named=True,
    short_ids=True, special=True,
)  # fmt: skip
QWEN_CODER = ToolFormat("qwen3_coder", ("<tool_call>", "<function="), "</tool_call>", "", xml=True)
HARMONY = ToolFormat("openai", (), "", "", special=True)
FORMATS = {style.name: style for style in (HERMES, LLAMA3, MISTRAL, QWEN_CODER, HARMONY)}


def choose_format(name: str, template: str | None) -> ToolFormat:
    """The format asked for, or the one whose marks the template writes; Hermes' where it has none."""
    if name != "auto":
        return FORMATS[name]
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" in source:
        return QWEN_CODER if "<function=" in source else HERMES
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and "tools" in source):
        return LLAMA3
    return HERMES


def knows_tools(template: str | None) -> bool:
    """Whether the template writes tools into the prompt by itself."""
    return "tools" in (template or "")


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation for a template that has never heard of tools: they are explained in the system message.

    Earlier calls and their results become text too, since such a template would leave them out.
    """
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You may call functions to help the user. The functions, as JSON:\n"
        f"<tools>\n{signatures}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON between tags, and nothing else:\n"
        '<tool_call>\n{"name": "function", "arguments": {"parameter": "value"}}\n</tool_call>'
    )
    plain = [_without_calls(message) for message in messages]
    if plain and plain[0].get("role") == "system":
        first = {**plain[0], "content": f"{plain[0].get('content') or ''}\n\n{text}".strip()}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") or {}
        shown = function.get("arguments", {})
        arguments = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        name = json.dumps(function.get("name"))
        calls.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return {"role": "assistant", "content": "\n".join([message.get("content") or "", *calls]).strip()}
