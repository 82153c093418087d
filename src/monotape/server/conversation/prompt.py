"""A chat request as the model reads it: its tools and grammar decided, its messages rendered and cut into tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from monotape.backends.token_ids import TokenIds
from monotape.engine.answer import THINK, THOUGHT
from monotape.engine.chat_template import Rendering
from monotape.engine.harmony.marks import speaks_harmony
from monotape.engine.harmony.prompt import Options, Span, opened_text, opening, spans, with_variables
from monotape.errors import ContextOverflow, RequestError
from monotape.server.api_error import bad_request, from_engine_error, unsupported
from monotape.server.conversation.answer import AnswerStyle, thinks
from monotape.server.conversation.messages import read_messages
from monotape.server.conversation.tool_formats import (
    HARMONY,
    ToolFormat,
    choose_format,
    knows_tools,
    with_tool_prompt,
)
from monotape.server.conversation.tools import Tools, tools_of
from monotape.server.requests.openai import ChatRequest
from monotape.server.requests.structured import Asked, grammar_of
from monotape.server.service.clock import Clock
from monotape.server.service.service import Service


@dataclass(frozen=True, slots=True)
class Form:
    """What shapes prompt and answer besides the messages, decided before anything is rendered."""

    template: str | None
    tools: Tools
    asked: Asked | None  # for structured output, or the call of a tool
    harmony: bool = False  # the model writes channels
    native: bool = False  # and its prompts are written here, not by its template


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokens of a chat, and how the answer to them is read."""

    ids: TokenIds
    style: AnswerStyle


def form_of(service: Service, request: ChatRequest) -> Form:
    text, _ = service.loaded()
    if request.chat_template is not None and not service.config.trust_request_chat_template:
        raise unsupported("chat_template", "start the server with --trust-request-chat-template to allow it.")
    template = request.chat_template or text.template
    asked = grammar_of(request)
    harmony = speaks_harmony(text.tokenizer, template)
    native = harmony and text.own_template and request.chat_template is None
    tools = tools_of(request, _format(service, template, harmony))
    if asked is not None and tools.forced is not None:
        raise bad_request(f"{asked.param} and a forced tool_choice exclude each other.", "tool_choice")
    if tools.forced is not None and request.continue_final_message:
        raise bad_request(
            "continue_final_message and a forced tool_choice exclude each other: a call begins a message of its own.",
            "tool_choice",
        )
    return Form(template, tools, asked or tools.forced, harmony, native)


def _format(service: Service, template: str | None, harmony: bool) -> ToolFormat:
    name = service.config.tool_call_parser
    if name == HARMONY.name and not harmony:
        raise bad_request(
            "This model has no channels: the server was started with the wrong --tool-call-parser."
        )
    return HARMONY if harmony and name == "auto" else choose_format(name, template)


async def write_prompt(
    service: Service, request: ChatRequest, form: Form, clock: Clock, context: int
) -> ChatPrompt:
    """Renders and tokenises; an error when the text cannot fit the context in any way."""
    text, _ = service.loaded()
    opened = _opening(form)
    try:
        if form.native:
            began = time.monotonic_ns()
            parts = harmony_spans(request, form, opened)
            clock.render_ns = time.monotonic_ns() - began
            ids, clock.tokenize_ns = await text.encode_spans(parts, context=context)
            return ChatPrompt(ids, _style(service, request, form, "", opened))
        ending = "".join(span.text for span in opened)
        messages, rendering = _rendering(request, form)
        ended = partial(_ended, form=form, opened=ending)
        written = await text.write(messages, rendering, ended=ended, context=context)
    except ContextOverflow as error:
        raise from_engine_error(error) from None
    except RequestError as error:
        message = f"{error.message} {error.hint}".strip()
        raise bad_request(message, "messages", "invalid_value") from None
    clock.render_ns, clock.tokenize_ns = written.render_ns, written.tokenize_ns
    return ChatPrompt(written.ids, _style(service, request, form, written.text, opened))


def _ended(rendered: str, *, form: Form, opened: str) -> str:
    """The prompt with the beginning of a constrained answer, which has no room for thoughts before it."""
    if form.asked is not None and rendered.rstrip().endswith(THINK):
        rendered += f"\n{THOUGHT}\n\n"
    return rendered + opened


def _opening(form: Form) -> tuple[Span, ...]:
    """The beginning of a constrained answer on a channel: there is no room for thoughts before it."""
    if not form.harmony or form.asked is None:
        return ()
    return opening("commentary", "functions.") if form.asked is form.tools.forced else opening("final")


def _style(
    service: Service, request: ChatRequest, form: Form, rendered: str, opened: tuple[Span, ...]
) -> AnswerStyle:
    if form.harmony and request.continue_final_message:
        opened = opening("final")
    parser = service.config.reasoning_parser
    return AnswerStyle(
        reasoning=parser != "none" if form.harmony else thinks(parser, form.template),
        open_in_prompt=rendered.rstrip().endswith(THINK),
        calls=form.tools.style,
        several=request.parallel_tool_calls is not False,
        schemas={tool.function.name: tool.function.parameters for tool in request.tools or []},
        channels=opened_text(opened) if form.harmony else None,
    )


def harmony_spans(request: ChatRequest, form: Form, opened: tuple[Span, ...]) -> list[tuple[str, bool]]:
    asked = request.reasoning_effort or (request.reasoning.effort if request.reasoning else None)
    continued = bool(request.continue_final_message)
    try:
        prompted = not continued if request.add_generation_prompt is None else request.add_generation_prompt
        options = Options(prompted=prompted, continued=continued, opened=opened)
        options = with_variables(options, {"reasoning_effort": asked, **(request.chat_template_kwargs or {})})
        functions = [tool["function"] for tool in form.tools.described]
        made = spans(read_messages(request.messages), functions, options)
    except RequestError as error:
        field = "reasoning_effort" if error.message.startswith("reasoning_effort") else "messages"
        raise bad_request(f"{error.message} {error.hint}", field, "invalid_value") from None
    return [(span.text, span.mark) for span in made]


def _rendering(request: ChatRequest, form: Form) -> tuple[Sequence[Mapping[str, Any]], Rendering]:
    """The messages as the template reads them, and what else it is given."""
    messages: Sequence[Mapping[str, Any]] = read_messages(request.messages)
    described: list[dict[str, Any]] | None = form.tools.described
    if described and not knows_tools(form.template):
        messages, described = with_tool_prompt(messages, described), None
    continued = bool(request.continue_final_message)
    prompted = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    return messages, Rendering(
        described or None, prompted, continued, request.chat_template, _variables(request, form)
    )


def _variables(request: ChatRequest, form: Form) -> dict[str, Any]:
    """The variables of the template. Effort and verbosity go only to a template that uses them."""
    source, given = form.template or "", dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort or (request.reasoning.effort if request.reasoning else None)
    if "enable_thinking" in source and (form.asked is not None or effort == "none"):
        given.setdefault("enable_thinking", False)
    if "reasoning_effort" in source and effort:
        given.setdefault("reasoning_effort", effort)
    if "verbosity" in source and request.verbosity:
        given.setdefault("verbosity", request.verbosity)
    return given
