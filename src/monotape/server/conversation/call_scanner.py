"""Reads one tool call, a JSON object with a name and arguments, as its characters come."""

from __future__ import annotations

import json
from collections.abc import Sequence


class CallScanner:
    """Feed it text from the object's opening brace on.

    `name` is known once its string has closed. What `feed` returns is the arguments' own JSON text as far as it is
    certain to belong to them; before the name is known it is kept back, whichever comes first in the object.
    """

    def __init__(self, argument_keys: Sequence[str] = ("arguments", "parameters")) -> None:
        self._argument_keys = frozenset(argument_keys)
        self.raw = ""  # everything taken so far
        self.name: str | None = None
        self.done = self.broken = False
        self._arguments: list[str] = []
        self._any_arguments = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._token = ""  # the top-level key or value being read
        self._key: str | None = None
        self._expects = "{"

    @property
    def streams_arguments(self) -> bool:
        """Whether they come as they are; arguments inside a JSON string must be complete first."""
        return self._expects == "value" and self._key in self._argument_keys and self._token[:1] in ("{", "[")

    @property
    def arguments_closed(self) -> bool:
        """Whether the arguments' object is complete and only the call's own brace is missing."""
        return self.streams_arguments and self._depth == 1 and self._token[-1:] in ("}", "]")

    @property
    def empty_arguments(self) -> bool:
        """Whether the call ended without any arguments."""
        return not self._any_arguments

    def feed(self, text: str, *, arguments_only: bool = False) -> tuple[str, str]:
        """Newly certain argument text, and what is left over after the object's end, or after the arguments'."""
        for index, character in enumerate(text):
            if self.done or self.broken or (arguments_only and self.arguments_closed):
                return self._take_arguments(), text[index:]
            self.raw += character
            self._step(character)
        return self._take_arguments(), ""

    def _take_arguments(self) -> str:
        if self.name is None:
            return ""
        taken, self._arguments = "".join(self._arguments), []
        self._any_arguments = self._any_arguments or bool(taken)
        return taken

    def _step(self, character: str) -> None:
        if self._in_string or self._depth > 1 or (character not in " \t\r\n"):
            if self._expects == "value":
                self._value(character)
            else:
                self._between(character)

    def _between(self, character: str) -> None:
        """Outside of values: braces, keys, colons and commas of the object itself."""
        if self._in_string:
            self._token += character
            if self._string_ends(character):
                self._key, self._token, self._expects = _decoded(self._token), "", ":"
        elif self._expects == "{" and character == "{":
            self._depth, self._expects = 1, "key"
        elif self._expects == "key" and character == '"':
            self._in_string, self._token = True, character
        elif self._expects == ":" and character == ":":
            self._expects, self._token = "value", ""
        elif self._expects == "," and character == ",":
            self._expects = "key"
        elif character == "}" and self._expects in (",", "key"):
            self._finish()
        else:
            self.broken = True

    def _value(self, character: str) -> None:
        if not self._token and character in " \t\r\n":
            return
        if not self._in_string and self._depth == 1 and self._token and character in ",}":
            return self._value_ended(character)
        self._token += character
        if self.streams_arguments:
            self._arguments.append(character)
        if self._in_string:
            self._string_ends(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.broken = self.broken or self._depth < 1

    def _value_ended(self, character: str) -> None:
        if self._key == "name":
            value = _decoded(self._token)
            self.name = value if isinstance(value, str) and value else None
            self.broken = self.name is None
        elif self._key in self._argument_keys and self._token[0] not in "{[":
            value = _decoded(self._token)  # arguments as JSON inside of a string, or null
            self._arguments.append(value if isinstance(value, str) else "{}")
        self._key, self._token, self._expects = None, "", ","
        if character == "}":
            self._finish()
        else:
            self._expects = "key"

    def _finish(self) -> None:
        self.done = True
        self.broken = self.name is None

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"' and len(self._token) > 1:
            self._in_string = False
            return True
        return False


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # deeper than the stack
        return None
    return value if isinstance(value, str) else None
