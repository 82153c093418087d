"""A conversation as the prompt that the model was trained to continue."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from monotape.engine.template_process import WITHOUT_TEMPLATE, TemplateLimits, TemplateProcess
from monotape.errors import RequestError, UsageError, did_you_mean

Message = Mapping[str, Any]

_MAPPINGS = (dict, Mapping)  # the first is told ten times as fast
#: At the end of a message that goes on, while the template writes it; the space shows whether the template trims.
_HERE = "MONOTAPE_GOES_ON_HERE "
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class RenderingArguments(TypedDict, total=False):
    """Rendering's fields as keyword arguments, for type checkers and editors."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation becomes a prompt: the arguments of LLM.render_chat beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True  # the beginning of an answer comes last
    continue_final_message: bool = False  # the answer goes on with the last message
    chat_template: str | None = None  # in place of the model's own
    chat_template_kwargs: Mapping[str, Any] | None = None  # further variables for it

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Rendering:
        """The arguments that a user gave; a UsageError for one that there is not."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise UsageError(
                    f"A chat has no argument '{name}'.",
                    f"{did_you_mean(name, known)}It has: {', '.join(known)}.",
                )
        return cls(**given)


PLAIN = Rendering()


class ChatTemplate:
    """A model's template, if it has one, and the special tokens it may write; rendered in its own process."""

    def __init__(
        self, source: str | None, named_tokens: Mapping[str, str], limits: TemplateLimits | None = None
    ) -> None:
        self.source = source
        self._named_tokens = dict(named_tokens)
        self._process = TemplateProcess(limits)

    def start(self) -> None:
        """Starts the rendering process, so that the first request need not wait for it."""
        self._process.start()

    def close(self) -> None:
        self._process.close()

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN) -> str:
        """The prompt."""
        source, context = self.question(messages, rendering)
        return cut(self._process.render(source, context), rendering)

    def question(self, messages: Sequence[Message], rendering: Rendering) -> tuple[str, dict[str, Any]]:
        """The template, and the variables that it is given. `cut` makes the prompt of what it writes."""
        source = rendering.chat_template or self.source
        if not source:
            raise RequestError(
                "This model has no chat template.",
                f"Give a template with chat_template, or {WITHOUT_TEMPLATE}.",
            )
        extra = dict(rendering.chat_template_kwargs or {})
        for name in extra:
            if not isinstance(name, str) or name in _RESERVED:
                raise RequestError(
                    f"chat_template_kwargs may not set {name!r}.", "Use the argument of chat() instead."
                )
        check_ends(messages, rendering)
        checked = [checked_message(message, index) for index, message in enumerate(messages)]
        if rendering.continue_final_message and (begun := checked[-1].get("content")):
            checked[-1]["content"] = begun + _HERE
        context = {
            "messages": checked,
            "tools": checked_tools(rendering.tools),
            "documents": None,
            "add_generation_prompt": rendering.add_generation_prompt,
            **self._named_tokens,
            **extra,
        }
        return source, context


def read_template(given: str) -> str:
    """A template given by the user: the text itself, or the path of a file."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The chat template {given!r} cannot be read: {getattr(error, 'strerror', None) or error}.",
            "Give the path of a template file, or the template itself.",
        ) from None


def check_ends(messages: Sequence[Message], rendering: Rendering) -> None:
    """Refuses an empty conversation, and one whose last message would both go on and be answered."""
    if rendering.continue_final_message and rendering.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both on.", "Switch one of them off."
        )
    if not messages:
        raise RequestError("The conversation has no messages.", "Give at least one.")


def checked_message(message: object, index: int) -> dict[str, Any]:
    """A message as templates expect it: text content, and tool arguments as objects instead of JSON text."""
    checked = text_message(message, index)
    if checked.get("tool_calls"):
        where = f"messages[{index}]"
        checked["tool_calls"] = [_with_arguments(call, where) for call in checked["tool_calls"]]
    return checked


def text_message(message: object, index: int) -> dict[str, Any]:
    """A message whose content is text."""
    if not isinstance(message, _MAPPINGS) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages[{index}] is not a message.", 'A message is {"role": "user", "content": "..."}.'
        )
    checked = dict(message)
    content = checked.get("content")
    if content is not None and not isinstance(content, str):
        checked["content"] = _text_content(content, f"messages[{index}]")
    return checked


def _text_content(content: object, where: str) -> str:
    parts = content if isinstance(content, Sequence) else [content]
    texts = []
    for part in parts:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{where} has content of the kind {kind!r}.",
                'This model reads text: use a string or {"type": "text", "text": "..."} parts.',
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _with_arguments(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(f"{where} has a tool call that is not an object.", "See OpenAI's chat format.")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise RequestError(
            f"{where} has tool call arguments that are not JSON.", "Send back what the model wrote, repaired."
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def checked_tools(tools: object) -> list[Any] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools is not a list of tool descriptions.", "See OpenAI's chat format.")
    return list(tools)


def cut(text: str, rendering: Rendering) -> str:
    """Where the last message is to go on, the prompt up to the end of its content."""
    if not rendering.continue_final_message:
        return text
    prompt, here, rest = text.rpartition(_HERE.rstrip())
    if not here:
        raise RequestError(
            "The chat template does not write the last message's content as it is.",
            "Switch continue_final_message off.",
        )
    return prompt if rest.startswith(" ") else prompt.rstrip()
