"""Reads an answer in harmony as it streams: analysis is reasoning, commentary and final are content, a message to a
function is a call.

Marks come with SPECIAL before them, so text that only looks like a mark stays text. Mistakes of a model are shown: a
message on an unknown channel, of another role, without a header or without an end is text of the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from monotape.engine.answer import Answer, CallArguments, CallBegins, Event, Say, new_call_id
from monotape.engine.harmony.marks import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    SPECIAL,
    START,
)

_LONGEST_HEADER = 512  # characters: more than any name of a function needs
_MARK = re.compile(rf"{SPECIAL}(<\|[^|]*\|>)")
_HALF_A_MARK = re.compile(rf"{SPECIAL}(<(\|([^|]*\|?)?)?)?")
_BARE_HEADER = re.compile(
    rf"(assistant)?(\s*to=\S*)?({SPECIAL}<\|channel\|>\s*\w*(\s+to=\S*)?)?(\s*{SPECIAL}<\|constrain\|>\w*|\s*json)?\s*"
)
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_FUNCTIONS = "functions."
_ANALYSIS = "analysis"
_ENDS = (END, CALL, RETURN)


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before a message: its role, channel and recipient."""

    role: str
    channel: str
    recipient: str | None

    @classmethod
    def read(cls, text: str) -> Header:
        """`text` goes from the role to the mark before the message, with its marks."""
        role, _, rest = text.partition(SPECIAL + CHANNEL)
        plain = [part.replace(SPECIAL + CONSTRAIN, " ").replace(SPECIAL, "") for part in (role, rest)]
        found = _RECIPIENT.search(plain[0]) or _RECIPIENT.search(plain[1])
        words = [_RECIPIENT.sub(" ", part).split() for part in plain]
        return cls(words[0][0] if words[0] else "", words[1][0] if words[1] else "", found and found[1])


@dataclass(frozen=True, slots=True)
class Channels:
    """How the answers to one prompt are read."""

    opened: str = ""  # what the prompt already has of the first message, after the role
    offered: frozenset[str] = frozenset()  # names of the functions that may be called
    several: bool = True  # calls in one answer
    thoughts: bool = True  # are told apart; otherwise they are text, with their marks

    def new_answer(self) -> Answer:
        return Answer(None, HarmonyParser(self))


class HarmonyParser:
    """One answer."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._buffer = ""
        self._header: str | None = "assistant"  # None: between messages or inside one
        self._kind: str | None = None  # of the message: "content", "reasoning", "marked" or "call"
        self._between = ""  # white space after a message
        self._given_arguments = False
        self.calls = 0
        self.feed(channels.opened)

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._step(events, ended=False):
            pass
        return events

    def end(self, *, cut: bool = False) -> list[Event]:
        """With what was held back: a header without a message is text."""
        events: list[Event] = []
        while self._step(events, ended=True):
            pass
        if self._header is not None:
            self._give_up(events)
        if self._kind == "marked":  # the model did not come to its end
            self._kind = None
        self._close(events)
        return events

    def _step(self, events: list[Event], *, ended: bool) -> bool:
        """Takes text up to a mark, and the mark. False: the rest is not known yet, or there is none."""
        at = self._buffer.find(SPECIAL)
        self._text(events, self._take(len(self._buffer) if at < 0 else at))
        if at < 0:
            return False
        if match := _MARK.match(self._buffer):
            self._take(match.end())
            self._mark(events, match[1])
            return True
        if _HALF_A_MARK.fullmatch(self._buffer) and not ended:
            return False
        self._take(len(SPECIAL))  # no mark follows, so the rest is text
        return True

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _mark(self, events: list[Event], mark: str) -> None:
        if mark == START:
            self._leave_header(events)
            self._close(events)
            self._header, self._kind = "", None
        elif mark == CHANNEL and (self._header is None or SPECIAL + CHANNEL in self._header):
            if self._header is not None and _RECIPIENT.search(self._header) is None:
                self._leave_header(events)
            recipient = _RECIPIENT.search(self._header or "")
            self._close(events)
            to = f" to={recipient[1].partition(SPECIAL)[0]}" if recipient else ""
            self._header, self._kind = f"assistant{to}{SPECIAL}{CHANNEL}", None
        elif mark == MESSAGE and self._header is not None:
            self._begin(events)
        elif mark in (CHANNEL, CONSTRAIN) and self._header is not None:
            self._header += SPECIAL + mark
        elif mark in _ENDS:
            self._leave_header(events)
            self._close(events)
        elif mark != MESSAGE:
            self._text(events, mark)  # a token that means nothing here

    def _text(self, events: list[Event], text: str) -> None:
        if not text:
            return
        if self._header is not None:
            self._header += text
            if not self._may_be_header():
                self._give_up(events)
        elif self._kind == "call":
            self._given_arguments = True
            self._report(events, CallArguments(self.calls, text))
        elif self._kind is not None:
            events.append(Say("content" if self._kind == "marked" else self._kind, text))
        else:
            self._between += text
            if self._between.strip():
                events.append(Say("content", self._between))
                self._between = ""

    def _may_be_header(self) -> bool:
        """Whether the words so far can stand before a message: a role, then a recipient or a channel."""
        assert self._header is not None
        if len(self._header) > _LONGEST_HEADER:
            return False
        if self._header.startswith("assistant") and SPECIAL not in self._header:
            rest = self._header.removeprefix("assistant").lstrip(" ")
            return rest.startswith("to=") or "to=".startswith(rest)
        return "\n" not in self._header.strip()

    def _begin(self, events: list[Event]) -> None:
        """The header is complete: decides what its message is."""
        header, self._header = Header.read(self._header or ""), None
        called = header.recipient or ""
        name = called.removeprefix(_FUNCTIONS)
        if (
            header.role == "assistant"
            and self._channels.offered
            and (called != name or name in self._channels.offered)
            and name
        ):
            self._kind, self._given_arguments = "call", False
            self._report(events, CallBegins(self.calls, new_call_id(), name))
        else:
            thought = header.role == "assistant" and header.channel == _ANALYSIS
            self._kind = ("reasoning" if self._channels.thoughts else "marked") if thought else "content"
            if self._kind == "marked":
                events.append(Say("content", f"{CHANNEL}{_ANALYSIS}{MESSAGE}"))

    def _report(self, events: list[Event], event: CallBegins | CallArguments) -> None:
        if self._channels.several or not self.calls:
            events.append(event)

    def _close(self, events: list[Event]) -> None:
        if self._kind == "call":
            if not self._given_arguments:
                self._report(events, CallArguments(self.calls, "{}"))
            self.calls += 1
        elif self._kind == "marked":
            events.append(Say("content", END))
        self._kind, self._between = None, ""

    def _leave_header(self, events: list[Event]) -> None:
        if self._header is not None:
            self._give_up(events)

    def _give_up(self, events: list[Event]) -> None:
        """No message follows the header. It is text of the answer, unless it is only a role and a channel."""
        header, self._header, self._kind = self._header or "", None, "content"
        if not _BARE_HEADER.fullmatch(header):
            events.append(Say("content", header.removeprefix("assistant").replace(SPECIAL, "")))
