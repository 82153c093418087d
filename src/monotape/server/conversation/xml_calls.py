"""Qwen3-Coder's tool calls, tags around plain values, as JSON arguments while they stream.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The schema of a function says which values are text. Text is passed on as it streams, other values once complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from monotape.engine.answer import CallArguments, CallBegins, Event, Say, new_call_id
from monotape.server.conversation.parameter_types import as_json, types_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^<>\s]{1,256})>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>\n?")
_END_OF_VALUE = "</parameter>"
_AFTER = ("<parameter=", "</function>", _CLOSE)  # the name of a function, or a value


class XmlCallParser:
    """One answer. `schemas` are the parameters of the functions that were offered."""

    def __init__(self, schemas: Mapping[str, Any], *, several: bool = True) -> None:
        self._schemas, self._several = schemas, several
        self._mode, self._buffer, self._held = "text", "", ""
        self._space = ""  # after a call
        self._types: frozenset[str] = frozenset()  # JSON types of the parameter that is being read
        self._name, self._keys = "", 0
        self._cut = False  # at the limit of tokens: what may be the beginning of a tag is one
        self.calls = 0

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        return self._run(ended=False)

    def end(self, *, cut: bool = False) -> list[Event]:
        self._cut = cut
        events = self._run(ended=True)
        if self._mode == "value":  # the answer ended inside a value: the part that came is passed on
            self._arguments(events, self._buffer if self._streams else self._held + self._buffer, cut=True)
        elif self._mode == "call":
            self._say(events, self._held + self._buffer)
        elif self._mode == "parameters" and not cut:  # only tags are missing; else parameters may be
            self._close(events)
            self._say(events, self._buffer)
        return events

    def _run(self, *, ended: bool) -> list[Event]:
        events: list[Event] = []
        while getattr(self, f"_in_{self._mode}")(events, ended):
            pass
        return events

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _in_text(self, events: list[Event], ended: bool) -> bool:
        found = [at for mark in (_OPEN, "<function=") if (at := self._buffer.find(mark)) >= 0]
        if found:
            self._say(events, self._take(min(found)))
            self._mode, self._held = "call", ""
            return True
        begins = not ended or (self._cut and self.calls)
        kept = max(_beginning(self._buffer, mark) for mark in (_OPEN, "<function=")) if begins else 0
        self._say(events, self._take(len(self._buffer) - kept))
        return False

    def _in_call(self, events: list[Event], ended: bool) -> bool:
        """After a mark: the function's tag and one that may follow it, or it was no call.

        Text may speak of the tags. Without <tool_call> only a function that was offered is called.
        """
        marked, inside = self._buffer.startswith(_OPEN), self._buffer.removeprefix(_OPEN).lstrip()
        match = _FUNCTION.match(inside)
        if match and (marked or match[1] in self._schemas):
            rest = inside[match.end() :].lstrip()
            unfinished = any(tag.startswith(rest) for tag in _AFTER)
            if rest.startswith(_AFTER) or (marked and ended and unfinished):
                self._begin_call(events, match[1], rest)
                return True
            if unfinished and not ended:
                return False
        begins = "<function=".startswith(inside) or (
            inside.startswith("<function=") and ">" not in inside and len(inside) < 300 and "\n" not in inside
        )
        if begins:
            return False
        self._say(events, self._take(len(_OPEN) if self._buffer.startswith(_OPEN) else 1))
        self._mode = "text"
        return True

    def _begin_call(self, events: list[Event], name: str, rest: str) -> None:
        self._buffer, self._mode, self._name, self._keys = rest, "parameters", name, 0
        self._report(events, CallBegins(self.calls, new_call_id(), name))
        self._report(events, CallArguments(self.calls, "{"))

    def _in_parameters(self, events: list[Event], ended: bool) -> bool:
        rest = self._buffer.lstrip()
        if match := _PARAMETER.match(rest):
            if match.end() == len(rest) and not match[0].endswith("\n") and not ended:
                return False  # the line break after the tag belongs to it
            self._buffer = rest[match.end() :]
            self._begin_value(events, match[1])
            return True
        for tag in ("</function>", _CLOSE):
            if rest.startswith(tag):
                self._buffer = rest[len(tag) :] if tag == "</function>" else rest
                self._close(events)
                self._mode = "closing"
                return True
        if any(tag.startswith(rest) for tag in _AFTER) or (
            rest.startswith("<parameter=") and len(rest) < 300
        ):
            return False
        self._close(events)  # anything else is text again
        self._mode = "text"
        return True

    def _in_closing(self, events: list[Event], ended: bool) -> bool:
        rest = self._buffer.lstrip()
        if _CLOSE.startswith(rest) and rest != _CLOSE:
            if not ended:
                return False
            if self._cut:
                rest = ""
        self._buffer = rest.removeprefix(_CLOSE)
        self._mode = "text"
        return True

    def _begin_value(self, events: list[Event], key: str) -> None:
        self._types = types_of(self._schemas.get(self._name), key)
        comma = ", " if self._keys else ""
        self._keys += 1
        self._held, self._mode = "", "value"
        opening = '"' if self._streams else ""
        name = json.dumps(key, ensure_ascii=False)
        self._report(events, CallArguments(self.calls, f"{comma}{name}: {opening}"))

    @property
    def _streams(self) -> bool:
        return self._types <= {"string"}

    def _in_value(self, events: list[Event], ended: bool) -> bool:
        at = self._buffer.find(_END_OF_VALUE)
        if at < 0:
            kept = max(
                _beginning(self._buffer, _END_OF_VALUE), _beginning(self._buffer, f"\n{_END_OF_VALUE}")
            )
            self._part(events, self._take(len(self._buffer) - kept))
            return False
        after = self._buffer[at + len(_END_OF_VALUE) :].lstrip()
        if not after.startswith(_AFTER):
            if any(tag.startswith(after) for tag in _AFTER) and (self._cut or not (ended and after)):
                if not ended:
                    kept = at - 1 if self._buffer[:at].endswith("\n") else at
                    self._part(events, self._take(max(0, kept)))
                    return False
            else:  # the tag is part of the value
                self._part(events, self._take(at + len(_END_OF_VALUE)))
                return True
        self._part(events, self._take(at).removesuffix("\n"))
        self._take(len(_END_OF_VALUE))
        self._end_value(events)
        return True

    def _part(self, events: list[Event], text: str) -> None:
        if not self._streams:
            self._held += text
        elif text:
            self._arguments(events, text)

    def _arguments(self, events: list[Event], text: str, *, cut: bool = False) -> None:
        written = json.dumps(text, ensure_ascii=False)[1:-1] if self._streams or not cut else text
        if written:
            self._report(events, CallArguments(self.calls, written))

    def _end_value(self, events: list[Event]) -> None:
        written = '"' if self._streams else as_json(self._held, self._types)
        self._report(events, CallArguments(self.calls, written))
        self._held, self._mode = "", "parameters"

    def _close(self, events: list[Event]) -> None:
        self._report(events, CallArguments(self.calls, "}"))
        self.calls += 1

    def _report(self, events: list[Event], event: CallBegins | CallArguments) -> None:
        if self._several or not self.calls:
            events.append(event)

    def _say(self, events: list[Event], text: str) -> None:
        if self.calls and not self._several:
            return
        if self.calls and not text.strip():
            self._space += text
            return
        text, self._space = self._space + text, ""
        if text:
            events.append(Say("content", text))


def _beginning(text: str, mark: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `mark`."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
