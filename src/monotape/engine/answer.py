"""An answer taken apart as it streams: what the model thinks, what it says, and the tools it calls."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Protocol

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Say:
    """Text of the answer; `kind` is "content" or "reasoning"."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str  # a part of the arguments' JSON


Event = Say | CallBegins | CallArguments


def new_call_id(*, short: bool = False) -> str:
    """Mistral's templates insist on nine letters or digits; others take anything."""
    return secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"


class ReasoningSplitter:
    """Text up to the closing mark is reasoning, if the answer or already the prompt began with the opening one."""

    def __init__(self, *, open_in_prompt: bool) -> None:
        self._mode = "reasoning" if open_in_prompt else "start"
        self._buffer = ""
        self._fresh = True  # the line break after the opening mark is part of it

    def feed(self, text: str) -> list[Say]:
        self._buffer += text
        said: list[Say] = []
        if self._mode == "start":
            self._look_for_start()
        if self._mode == "reasoning":
            self._reason(said)
        if self._mode == "gap":
            self._buffer = self._buffer.lstrip("\n")
            self._mode = "content" if self._buffer else "gap"
        if self._mode == "content" and self._buffer:
            said.append(Say("content", self._buffer))
            self._buffer = ""
        return said

    def end(self) -> list[Say]:
        kind = "reasoning" if self._mode == "reasoning" else "content"
        rest, self._buffer = self._buffer, ""
        return [Say(kind, rest)] if rest and self._mode != "gap" else []

    def _look_for_start(self) -> None:
        stripped = self._buffer.lstrip()
        if stripped.startswith(THINK):
            self._mode, self._buffer = "reasoning", stripped[len(THINK) :]
        elif not THINK.startswith(stripped):
            self._mode = "content"

    def _reason(self, said: list[Say]) -> None:
        if self._fresh and self._buffer:
            self._buffer, self._fresh = self._buffer.removeprefix("\n"), False
        thought, mark, rest = self._buffer.partition(THOUGHT)
        if mark:
            self._mode, self._buffer = "gap", rest
        else:
            kept = next(
                (size for size in range(len(THOUGHT) - 1, 0, -1) if self._buffer.endswith(THOUGHT[:size])), 0
            )
            thought, self._buffer = (
                self._buffer[: len(self._buffer) - kept],
                self._buffer[len(self._buffer) - kept :],
            )
        if thought:
            said.append(Say("reasoning", thought))


@dataclass(slots=True)
class Call:
    """A tool call, complete or as far as it has come."""

    id: str
    name: str
    arguments: str = ""


class Parser(Protocol):
    """Finds calls in what is said; harmony's finds thoughts too."""

    def feed(self, text: str) -> list[Event]: ...
    def end(self, *, cut: bool = False) -> list[Event]:
        """What is left. `cut`: the limit of tokens has come, so a call or a mark may lack its end."""
        ...


@dataclass(slots=True)
class Answer:
    """The events of one answer, and their sum."""

    splitter: ReasoningSplitter | None
    parser: Parser | None
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def feed(self, text: str) -> list[Event]:
        return self._keep(self._parse(self.splitter.feed(text) if self.splitter else [Say("content", text)]))

    def end(self, text: str, *, cut: bool = False) -> list[Event]:
        """With the last of the text. `cut`: the limit of tokens has come."""
        events = self._parse(self.splitter.feed(text) if self.splitter else [Say("content", text)])
        if self.splitter is not None:
            events += self._parse(self.splitter.end())
        if self.parser is not None:
            events += self.parser.end(cut=cut)
        return self._keep(events)

    def _parse(self, said: list[Say]) -> list[Event]:
        events: list[Event] = []
        for say in said:
            if say.kind == "content" and self.parser is not None:
                events += self.parser.feed(say.text)
            elif say.text:
                events.append(say)
        return events

    def _keep(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, CallBegins):
                self.calls.append(Call(event.id, event.name))
            elif isinstance(event, CallArguments):
                self.calls[event.index].arguments += event.text
            elif event.kind == "reasoning":
                self.reasoning += event.text
            else:
                self.content += event.text
        return events
