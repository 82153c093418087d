"""Finds tool calls in an answer as it streams: text goes on as soon as it cannot be the beginning of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Container

from monotape.engine.answer import CallArguments, CallBegins, Event, Say, new_call_id
from monotape.server.conversation.call_scanner import CallScanner
from monotape.server.conversation.tool_formats import ToolFormat

_NAMED = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\]\s*[\w\-]+\s*)?\[ARGS\]\s*")


class ToolParser:
    """One answer. A call that turns out not to be one is given back as text, nothing of it lost.

    `offered` are the names of the functions: an answer that begins, without a mark, with an object that has another
    name and no arguments is data.
    """

    def __init__(self, style: ToolFormat, *, offered: Container[str], several: bool = True) -> None:
        self._style, self._offered, self._several = style, offered, several
        self._mode = "text"
        self._buffer = ""
        self._marker = ""
        self._scanner: CallScanner | None = None
        self._announced = self._named = False
        self._said = False  # any text that is not white space
        self._space = ""  # after a call
        self._cut = False  # at the limit of tokens: what may be the beginning of a mark is one
        self.calls = 0

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while getattr(self, f"_in_{self._mode}")(events, False):
            pass
        return events

    def end(self, *, cut: bool = False) -> list[Event]:
        """What is left when the answer has ended."""
        self._cut = cut
        events: list[Event] = []
        while getattr(self, f"_in_{self._mode}")(events, True):
            pass
        if self._mode == "call" and not self._announced:
            self._give_up(events)
            self._in_text(events, True)
        return events

    def _in_text(self, events: list[Event], ended: bool) -> bool:
        """Looks for the beginning of a call. True: the mode has changed, and there is more to look at."""
        if self._style.bare and not self._said and not self.calls and self._buffer.lstrip()[:1] == "{":
            return self._begin("", 0)
        found = [(at, mark) for mark in self._style.begins if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._say(events, self._buffer[:at])
            return self._begin(mark, at + len(mark))
        kept = 0 if ended and not (self._cut and self.calls) else self._possible_begin()
        said, self._buffer = (
            self._buffer[: len(self._buffer) - kept],
            self._buffer[len(self._buffer) - kept :],
        )
        if self._style.bare and not self._said and not said.strip() and not ended:
            self._buffer = said + self._buffer
        else:
            self._say(events, said)
        return False

    def _begin(self, mark: str, skip: int) -> bool:
        self._marker, self._buffer = mark, self._buffer[skip:]
        self._mode, self._scanner, self._announced, self._named = "call", None, False, False
        return True

    def _say(self, events: list[Event], text: str) -> None:
        if self.calls and not self._several:
            return
        if self.calls and not text.strip():
            self._space += text  # line breaks between calls are not an answer, unless one follows
            return
        text, self._space = self._space + text, ""
        self._said = self._said or bool(text.strip())
        if text:
            events.append(Say("content", text))

    def _possible_begin(self) -> int:
        longest = max(map(len, self._style.begins), default=0) - 1
        for length in range(min(longest, len(self._buffer)), 0, -1):
            if any(mark.startswith(self._buffer[-length:]) for mark in self._style.begins):
                return length
        return 0

    def _in_call(self, events: list[Event], ended: bool) -> bool:
        if self._scanner is None and not self._find_object(ended):
            return False
        assert self._scanner is not None
        arguments, self._buffer = self._scanner.feed(self._buffer, arguments_only=self._named)
        if self._named and self._scanner.arguments_closed:
            more, _ = self._scanner.feed("}")
            arguments += more
        if self._scanner.broken and not self._announced:
            self._give_up(events)
            return True
        if self._may_be_data(self._scanner):
            if not self._scanner.done:
                return False
            self._give_up(events)
            return True
        self._report(events, arguments)
        if self._scanner.done or self._scanner.broken:
            if self._announced and self._scanner.empty_arguments:
                self._report(events, "{}")
            self.calls += 1
            self._mode = "gap"
            return True
        return False

    def _may_be_data(self, scanner: CallScanner) -> bool:
        announced = self._marker.strip() or self.calls  # a mark announces all calls that follow
        return not announced and scanner.empty_arguments and scanner.name not in self._offered

    def _find_object(self, ended: bool) -> bool:
        """Skips to the call's object. False: it is not there yet."""
        stripped = self._buffer.lstrip(self._style.skips)
        if stripped[:1] == "{":
            self._marker += self._buffer[: len(self._buffer) - len(stripped)]
            self._scanner, self._buffer = CallScanner(), stripped
            return True
        if self._style.named and (match := _NAMED.match(stripped)):
            self._scanner, self._named = CallScanner(), True
            self._scanner.feed(f'{{"name": {json.dumps(match.group(1))}, "arguments": ')
            self._buffer = stripped[match.end() :]
            return True
        waits = not stripped or (self._style.named and "{" not in stripped and len(stripped) < 512)
        if waits and not ended:
            return False
        self._scanner = CallScanner()
        self._scanner.broken = True  # the call will not come; what looked like its beginning is text
        return True

    def _give_up(self, events: list[Event]) -> None:
        """It was no call: the held text is passed on as text."""
        raw = self._marker + (self._scanner.raw if self._scanner is not None else "")
        self._mode, self._scanner, self._marker = "text", None, ""
        self._said = True
        if raw:
            events.append(Say("content", raw))

    def _report(self, events: list[Event], arguments: str) -> None:
        scanner = self._scanner
        assert scanner is not None
        if scanner.name is None or (self.calls and not self._several):
            return
        if not self._announced:
            self._announced = True
            events.append(CallBegins(self.calls, new_call_id(short=self._style.short_ids), scanner.name))
        if arguments:
            events.append(CallArguments(self.calls, arguments))

    def _in_gap(self, events: list[Event], ended: bool) -> bool:
        """After a call: its end mark, a separator, the next call, or text again."""
        stripped = self._buffer.lstrip(self._style.separators + " \t\r\n")
        if self._style.ends and stripped.startswith(self._style.ends):
            self._buffer, self._mode = stripped[len(self._style.ends) :], "text"
            return True
        if self._style.ends and self._style.ends.startswith(stripped):
            if not ended:
                return False
            if self._cut:
                stripped = ""
        if stripped[:1] == "{" and self._style.separators:
            self._buffer = stripped
            return self._begin("", 0)
        if not stripped and not ended:
            return False
        self._buffer, self._mode = stripped, "text"
        return True
