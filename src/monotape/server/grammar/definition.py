"""Structured output as requests ask for it: checked for size here, compiled where a process can be killed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from monotape.errors import RequestError

MAX_GRAMMAR_CHARACTERS = 1 << 20
MAX_CHOICES = 10_000

Kind = Literal["json", "regex", "choice", "lark", "tool", "channels"]
#: What each kind is called in sentences.
NAMES: dict[Kind, str] = {
    "json": "The JSON schema", "regex": "The regular expression", "choice": "The list of choices",
    "lark": "The grammar", "tool": "The schema of a tool",
    "channels": "The schema of a tool",
}  # fmt: skip


class Grammar(msgspec.Struct, frozen=True):
    """What the answer must look like. `text` is a schema, a list or a tool call as JSON, or a pattern or grammar."""

    kind: Kind
    text: str


def from_json_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """Text that is JSON of this schema."""
    return _sized("json", _as_json(schema, "json"))


def from_regex(pattern: str) -> Grammar:
    return _sized("regex", pattern)


def from_choice(choices: Sequence[str]) -> Grammar:
    """Exactly one of these texts."""
    if not choices:
        raise RequestError("The list of choices is empty.", "Give at least one.")
    if len(choices) > MAX_CHOICES:
        raise RequestError(
            f"The list of choices has {len(choices)} entries.", f"At most {MAX_CHOICES} are allowed."
        )
    if not all(choices):
        raise RequestError("One of the choices is empty.", "Every choice needs at least one character.")
    return _sized("choice", _as_json(list(choices), "choice"))


def from_lark(grammar: str) -> Grammar:
    """A grammar in Lark's syntax, or in llama.cpp's GBNF."""
    return _sized("lark", grammar)


def from_tool(begin: str, name_key: str, arguments_key: str, end: str, tools: Mapping[str, Any]) -> Grammar:
    """One call of one of these functions, written as the model's template wants it."""
    call = {"begin": begin, "end": end, "name_key": name_key, "arguments_key": arguments_key, "tools": tools}
    return _sized("tool", _as_json(call, "tool"))


def from_channels(tools: Mapping[str, Any]) -> Grammar:
    """One call in harmony, from the name of the function on: what stands before it is in the prompt."""
    return _sized("channels", _as_json(dict(tools), "channels"))


def _as_json(value: Any, kind: Kind) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{NAMES[kind]} cannot be used: {error}.", "Simplify it.") from None


def _sized(kind: Kind, text: str) -> Grammar:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{NAMES[kind]} is {len(text)} characters long.", f"At most {MAX_GRAMMAR_CHARACTERS} are allowed."
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{NAMES[kind]} has half of a surrogate pair, which no text can hold.", "Remove it."
        ) from None
    return Grammar(kind, text)
