"""What a stream of events adds up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from monotape.engine.answer import CallArguments, CallBegins, Event


def summed(events: Iterable[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, words, and calls with their arguments."""
    said: dict[str, Any] = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegins):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
        else:
            said[event.kind] += event.text
    return said["reasoning"], said["content"], [(name, arguments) for name, arguments in calls]


def cut_everywhere(text: str) -> Iterable[list[str]]:
    """The text in two parts, cut at every place, and in parts of a few sizes."""
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    for size in (1, 2, 3, 7):
        yield [text[start : start + size] for start in range(0, len(text), size)]
