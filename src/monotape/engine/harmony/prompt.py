"""A conversation in harmony: the system's and the developer's message, then every turn on its channel.

Analysis is kept while tools are being called, and left out before the last final answer, as the model was trained.
Only marks are tokens of their own: a mark that stands in a message is encoded as the text that it is.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monotape.engine.harmony import typescript
from monotape.engine.harmony.marks import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, SPECIAL, START
from monotape.errors import RequestError

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CUTOFF = "2024-06"
#: The three efforts that the model knows. Efforts of other models are mapped to the nearest.
EFFORTS = {
    "none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a prompt: one mark, or text that holds none."""

    text: str
    mark: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What shapes a prompt besides its messages and tools."""

    effort: str = "medium"
    identity: str = IDENTITY
    date: str | None = None  # None: today's
    prompted: bool = True  # the assistant is asked for its next message
    continued: bool = False  # the last message goes on
    opened: tuple[Span, ...] = ()  # of the next message, after its role


def effort_of(asked: str | None) -> str:
    if asked is None:
        return "medium"
    if asked not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is {asked[:60]!r}.",
            f"Known: {', '.join(EFFORTS)}; this model has low, medium and high.",
        )
    return EFFORTS[asked]


def with_variables(options: Options, given: Mapping[str, Any]) -> Options:
    """The options, with the two variables of gpt-oss's template: reasoning_effort and model_identity."""
    effort = given.get("reasoning_effort")
    return replace(
        options,
        effort=effort_of(None if effort is None else str(effort)),
        identity=str(given.get("model_identity", options.identity)),
    )


def spans(
    messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], options: Options
) -> list[Span]:
    """The prompt. `functions` are {"name", "description", "parameters"}."""
    made = [*_message("system", _system(functions, options))]
    developer, rest = _developer(messages)
    if developer or functions:
        parts = [f"# Instructions\n\n{developer}"] if developer else []
        parts += [f"# Tools\n\n{typescript.namespace(functions)}"] if functions else []
        made += _message("developer", "\n\n".join(parts))
    final = max((index for index, message in enumerate(rest) if _is_final(message)), default=-1)
    names: dict[str, str] = {}  # of the functions that were called, by the ids of the calls
    for index, message in enumerate(rest):
        made += _turn(message, names, thoughts=index > final)
    if options.continued:
        if not rest or not _is_final(rest[-1]):
            raise RequestError(
                "The last message is no answer that could go on.", "Switch continue_final_message off."
            )
        return made[:-1]
    if options.prompted:
        made += [Span(START, True), Span("assistant"), *options.opened]
    return made


def opening(channel: str, recipient: str | None = None) -> tuple[Span, ...]:
    """The beginning of an answer that a grammar constrains: it has no room for thoughts."""
    if recipient is None:
        return Span(CHANNEL, True), Span(channel), Span(MESSAGE, True)
    return Span(CHANNEL, True), Span(f"{channel} to={recipient}")


def opened_text(opened: Sequence[Span]) -> str:
    """An opening as the parser reads it, with SPECIAL before each mark."""
    return "".join(SPECIAL + span.text if span.mark else span.text for span in opened)


def _system(functions: Sequence[Mapping[str, Any]], options: Options) -> str:
    date = options.date or datetime.date.today().isoformat()
    lines = [
        options.identity, f"Knowledge cutoff: {CUTOFF}", f"Current date: {date}", "",
        f"Reasoning: {options.effort}", "",
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.",
    ]  # fmt: skip
    if functions:
        lines.append("Calls to these tools must go to the commentary channel: 'functions'.")
    return "\n".join(lines)


def _developer(messages: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """The instructions and the other messages. An application's system message is harmony's developer message."""
    if messages and messages[0]["role"] in ("system", "developer"):
        return str(messages[0].get("content") or ""), messages[1:]
    return "", messages


def _is_final(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls") and bool(message.get("content"))


def _turn(message: Mapping[str, Any], names: dict[str, str], *, thoughts: bool) -> Iterator[Span]:
    role, content = message["role"], str(message.get("content") or "")
    if role == "tool":
        name = (
            names.get(str(message.get("tool_call_id")))
            or message.get("name")
            or next(reversed(names.values()), None)
        )
        if not name:
            raise RequestError(
                "A tool's result comes before any call.", "Send the assistant's message with tool_calls."
            )
        yield from _message(f"functions.{name} to=assistant", content, channel="commentary")
    elif role != "assistant":
        yield from _message("developer" if role == "system" else role, content)
    else:
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought and thoughts:
            yield from _message("assistant", str(thought), channel="analysis")
        calls = message.get("tool_calls") or []
        if content:
            yield from _message("assistant", content, channel="commentary" if calls else "final")
        for call in calls:
            yield from _called(call, names)


def _called(call: Mapping[str, Any], names: dict[str, str]) -> Iterator[Span]:
    function = call.get("function") or {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise RequestError(
            "A tool call has no name, or arguments that are no text.", "See OpenAI's chat format."
        )
    names[str(call.get("id"))] = name
    yield from (Span(START, True), Span(f"assistant to=functions.{name}"), Span(CHANNEL, True))
    yield from (Span("commentary "), Span(CONSTRAIN, True), Span("json"), Span(MESSAGE, True))
    yield from (Span(arguments), Span(CALL, True))


def _message(header: str, content: str, channel: str | None = None) -> Iterator[Span]:
    yield from (Span(START, True), Span(header))
    if channel is not None:
        yield from (Span(CHANNEL, True), Span(channel))
    yield from (Span(MESSAGE, True), Span(content), Span(END, True))
