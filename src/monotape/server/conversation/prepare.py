"""A chat request made ready: its prompt, how tokens are chosen, and how to read the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from monotape.errors import RequestError
from monotape.server.api_error import ApiError, bad_request, from_engine_error, unsupported
from monotape.server.conversation.answer import THINK, THOUGHT, Answer, new_answer, thinks
from monotape.server.conversation.tool_formats import ToolFormat, choose_format, knows_tools, with_tool_prompt
from monotape.server.grammar.definition import from_tool
from monotape.server.requests.openai import ChatRequest, NamedTool
from monotape.server.requests.sampling import Asked, grammar_of, sampling_arguments
from monotape.server.service.clock import Clock
from monotape.server.service.service import Service, Work

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MESSAGE_FIELDS = frozenset({"messages"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an interface needs to run a chat and to read what comes."""

    work: Work
    completions: int
    new_answer: Callable[[], Answer]


@dataclass(frozen=True, slots=True)
class Tools:
    """What of a request's tools is in force."""

    described: list[dict[str, Any]]  # for the template
    style: ToolFormat | None  # None: calls are not looked for
    forced: Asked | None  # when one must be called


async def prepare(
    service: Service, request: ChatRequest, clock: Clock, *, counted: bool = False, clamp: bool = False
) -> Conversation:
    """Checks and renders a chat; everything that takes time happens in threads. To be counted it need not fit.

    `clamp`: only the prompt has to fit, and max_tokens becomes what is left.
    """
    text, info = service.loaded()
    if request.chat_template is not None and not service.config.trust_request_chat_template:
        raise unsupported("chat_template", "start the server with --trust-request-chat-template to allow it.")
    source = request.chat_template or text.template
    tools, asked = _constraints(service, request, source)
    if not counted:
        await service.compile(asked)
    rendered, clock.render_ns = await _render(service, request, tools, source, constrained=asked is not None)
    if asked is not None and rendered.rstrip().endswith(THINK):
        rendered += (
            f"\n{THOUGHT}\n\n"  # what is constrained is the answer; there is no room for thoughts before it
        )
    try:
        ids, clock.tokenize_ns = await text.encode(
            rendered, add_special=False, context=service.config.max_body_bytes if counted else info.context
        )
    except RequestError as error:
        raise from_engine_error(error, _MESSAGE_FIELDS) from None
    arguments = _arguments(service, request, tools)
    if not counted:
        arguments = service.fit(ids, arguments, clamp=clamp)
    reasoning = thinks(service.config.reasoning_parser, source)
    open_in_prompt = rendered.rstrip().endswith(THINK)
    several = request.parallel_tool_calls is not False

    def make() -> Answer:
        return new_answer(
            reasoning=reasoning, open_in_prompt=open_in_prompt, style=tools.style, several=several
        )

    return Conversation(
        Work(ids, arguments, None if asked is None else asked.grammar, clock), request.n or 1, make
    )


def _constraints(service: Service, request: ChatRequest, source: str | None) -> tuple[Tools, Asked | None]:
    asked = grammar_of(request)
    tools = _tools(request, choose_format(service.config.tool_call_parser, source))
    if asked is not None and tools.forced is not None:
        raise bad_request(f"{asked.param} and a forced tool_choice exclude each other.", "tool_choice")
    return tools, asked or tools.forced


def _tools(request: ChatRequest, style: ToolFormat) -> Tools:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools.", "tool_choice", "invalid_value")
        return Tools([], None, None)
    if choice == "none":
        return Tools([], None, None)
    described = [_described(tool) for tool in request.tools]
    offered = {tool.function.name: tool.function.parameters for tool in request.tools}
    if isinstance(choice, NamedTool):
        if choice.function.name not in offered:
            raise bad_request(
                f"tool_choice names '{choice.function.name}', which is not in tools.",
                "tool_choice",
                "invalid_value",
            )
        offered = {choice.function.name: offered[choice.function.name]}
    elif choice != "required":
        return Tools(described, style, None)
    # Marks that are special tokens are left out here: the grammar alone makes it a call.
    begin, end = ("", "") if style.special else (style.begins[0] + "\n", "\n" + style.ends)
    return Tools(
        described,
        dataclasses.replace(style, bare=True),
        _tool_grammar(begin, style.arguments_key, end, offered),
    )


def _described(tool: Any) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(tool)
    shown["function"] = {name: value for name, value in shown["function"].items() if value is not None}
    return shown


def _tool_grammar(begin: str, key: str, end: str, offered: Mapping[str, Any]) -> Asked:
    try:
        return Asked("tools", from_tool(begin, "name", key, end, offered))
    except RequestError as error:
        raise bad_request(f"{error.message} {error.hint}", "tools", "invalid_value") from None


def _arguments(service: Service, request: ChatRequest, tools: Tools) -> dict[str, Any]:
    decided: dict[str, Any] = {"max_tokens": request.max_completion_tokens or request.max_tokens}
    if request.logprobs:
        decided["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs", "invalid_value")
    if tools.style is not None and tools.style.special:
        decided["skip_special_tokens"] = False
    return sampling_arguments(request, service.engine.defaults, **decided)


async def _render(
    service: Service, request: ChatRequest, tools: Tools, source: str | None, *, constrained: bool
) -> tuple[str, int]:
    text, _ = service.loaded()
    messages: Sequence[Mapping[str, Any]] = joined_system(
        [checked_message(message, index) for index, message in enumerate(request.messages)]
    )
    described: list[dict[str, Any]] | None = tools.described
    if described and not knows_tools(source):
        messages, described = with_tool_prompt(messages, described), None
    continued = bool(request.continue_final_message)
    prompted = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    try:
        return await text.render(
            messages,
            tools=described or None,
            add_generation_prompt=prompted,
            continue_final_message=continued,
            template=request.chat_template,
            variables=_variables(request, source or "", constrained=constrained),
        )
    except RequestError as error:
        message = f"{error.message} {error.hint}".strip()
        raise bad_request(message, "messages", "invalid_value") from None


def _variables(request: ChatRequest, source: str, *, constrained: bool) -> dict[str, Any]:
    """The variables of the template. Effort and verbosity go only to a template that uses them."""
    given = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort or (request.reasoning.effort if request.reasoning else None)
    if "enable_thinking" in source and (constrained or effort == "none"):
        given.setdefault("enable_thinking", False)
    if "reasoning_effort" in source and effort:
        given.setdefault("reasoning_effort", effort)
    if "verbosity" in source and request.verbosity:
        given.setdefault("verbosity", request.verbosity)
    return given


def joined_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message at the beginning, where a client sends several: most templates know only one."""
    first = next(
        (index for index, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    if first < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:first])
    return [{**messages[0], "content": text}, *messages[first:]]


def checked_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message with text for content, the roles that templates know, and reasoning under both of its names."""
    role = message.get("role")
    if role not in _ROLES:
        raise bad_request(
            f"messages[{index}] has the role {str(role)[:60]!r}. Known: {', '.join(_ROLES)}.",
            "messages",
            "invalid_value",
        )
    checked = {**message, "role": "system" if role == "developer" else role}
    checked["content"] = text_of(message.get("content"), f"messages[{index}]")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(thought, str):
        checked["reasoning_content"] = checked["reasoning"] = thought
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise bad_request(
            f"messages[{index}].tool_calls is not a list of calls.", "messages", "invalid_value"
        )
    return checked


def text_of(content: Any, where: str) -> str:
    """The text of a message, whole or in parts. Pictures and sounds are refused, not dropped."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(
            f"{where} has content that is neither text nor a list of parts.", "messages", "invalid_value"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        value = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(value, str):
            raise ApiError(
                400, f"{where} has a part of the type {str(kind)[:60]!r}. This model reads text only.",
                code="unsupported_content", param="messages",
            )  # fmt: skip
        texts.append(value)
    return "\n".join(texts)
