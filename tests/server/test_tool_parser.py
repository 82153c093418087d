"""Tool calls and thoughts found in a stream, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from monotape.engine.answer import CallArguments, CallBegins, Event, ReasoningSplitter, Say
from monotape.server.conversation.answer import thinks
from monotape.server.conversation.blocks import Blocks
from monotape.server.conversation.call_scanner import CallScanner
from monotape.server.conversation.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    choose_format,
    knows_tools,
    with_tool_prompt,
)
from monotape.server.conversation.tool_parser import ToolParser

ONE = '{"name": "f", "arguments": {"a": "}\\" {", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "}\\" {", "b": [1, {"c": null}]}'


def parsed(
    style: ToolFormat, text: str, step: int, *, cut: bool = False, **more: Any
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes `step` characters at a time."""
    parser, events = ToolParser(style, offered=("f", "g"), **more), list[Event]()
    for start in range(0, len(text), step):
        events += parser.feed(text[start : start + step])
    events += parser.end(cut=cut)
    content, names, arguments = "", list[str](), list[str]()
    for event in events:
        if isinstance(event, CallBegins):
            assert event.index == len(names)
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, CallArguments):
            arguments[event.index] += event.text
        else:
            content += event.text
    return content, list(zip(names, arguments, strict=True))


CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "just text", "just text", []),
    (HERMES, f"Sure.\n<tool_call>\n{ONE}\n</tool_call>", "Sure.\n", [("f", ARGUMENTS)]),
    (HERMES, f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
    (HERMES, f"<tool_call>{ONE}</tool_call> done", " done", [("f", ARGUMENTS)]),
    (HERMES, f"<tool_call>{ONE}\n</tool_x", "</tool_x", [("f", ARGUMENTS)]),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "late"}</tool_call>', "", [("late", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "text", "arguments": "{\\"q\\": 1}"}</tool_call>', "", [("text", '{"q": 1}')]),
    (HERMES, '<tool_call>{"name": "none"}</tool_call>', "", [("none", "{}")]),
    (HERMES, '<tool_call>{"name": "null", "arguments": null}</tool_call>', "", [("null", "{}")]),
    (HERMES, "a < b, <tool_, <tool_call>no</tool_call>", "a < b, <tool_, <tool_call>no</tool_call>", []),
    (HERMES, '<tool_call>\n{"nam', '<tool_call>\n{"nam', []),
    (HERMES, '<tool_call>\n{"name": 7}', '<tool_call>\n{"name": 7}', []),
    (HERMES, '<tool_call>{"name": "cut", "arguments": {"a": "b', "", [("cut", '{"a": "b')]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "",
     [("f", "{}"), ("g", "{}")]),
    (LLAMA3, '  {"answer": 1} is JSON', '  {"answer": 1} is JSON', []),
    (LLAMA3, '{"name": "f"}', "", [("f", "{}")]),
    (LLAMA3, '{"name": "h", "parameters": {"a": 1}}', "", [("h", '{"a": 1}')]),
    (LLAMA3, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    (LLAMA3, '{"name": "Ada", "age"', '{"name": "Ada", "age"', []),
    (LLAMA3, 'I say {"name": "f"}', 'I say {"name": "f"}', []),
    (LLAMA3, "  ", "  ", []),
    (MISTRAL, f'[TOOL_CALLS] [{ONE}, {{"name": "h"}}]', "", [("f", ARGUMENTS), ("h", "{}")]),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}, {ONE}]", "", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
    (MISTRAL, 'Well [TOOL_CALLS]f[ARGS]{"a": "{"}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', "Well ",
     [("f", '{"a": "{"}'), ("g", "{}")]),
    (MISTRAL, "[TOOL_CALLS] what", "[TOOL_CALLS] what", []),
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    style: ToolFormat, text: str, content: str, calls: list[tuple[str, str]], step: int
) -> None:
    assert parsed(style, text, step) == (content, calls)


@pytest.mark.parametrize("mark", ["\n</tool_ca", "</tool_call>\n<tool_ca"])
def test_the_beginning_of_a_mark_is_none_of_the_text_where_the_answer_reached_its_limit(mark: str) -> None:
    assert parsed(HERMES, f"<tool_call>{ONE}{mark}", 3, cut=True) == ("", [("f", ARGUMENTS)])
    said, _ = parsed(HERMES, f"<tool_call>{ONE}{mark}", 3)
    assert said.strip() in mark and said.endswith("tool_ca")


def test_text_goes_out_as_soon_as_it_cannot_be_a_call() -> None:
    parser = ToolParser(HERMES, offered=("f",))
    assert parser.feed("a <tool") == [Say("content", "a ")]
    assert parser.feed("box>") == [Say("content", "<toolbox>")]


def test_arguments_stream_before_they_are_complete() -> None:
    parser = ToolParser(HERMES, offered=("f",))
    (begins,) = parser.feed('<tool_call>{"name": "f", "arguments":')
    assert isinstance(begins, CallBegins) and begins.name == "f" and begins.id.startswith("call_")
    assert parser.feed(' {"a": "lo') == [CallArguments(0, '{"a": "lo')]
    assert parser.feed('ng"') == [CallArguments(0, 'ng"')]


def test_one_call_only_where_more_are_not_wanted() -> None:
    text = f"<tool_call>{ONE}</tool_call><tool_call>{ONE}</tool_call>"
    assert parsed(HERMES, text, 5, several=False)[1] == [("f", ARGUMENTS)]


def test_mistral_wants_ids_of_nine_characters() -> None:
    events = ToolParser(MISTRAL, offered=("f",)).feed(f"[TOOL_CALLS][{ONE}]")
    assert isinstance(events[0], CallBegins) and len(events[0].id) == 9 and events[0].id.isalnum()


@pytest.mark.parametrize(
    "broken", ["{x", '{"a" 1}', '{"name": }', '{"name": "f" "x"}', "{,}", '{"name": "f"]']
)
def test_a_broken_object_is_noticed(broken: str) -> None:
    scanner = CallScanner()
    scanner.feed(broken + "}}}")
    assert scanner.broken or scanner.name is None


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("{{ tools }} <tool_call>", HERMES),
        ("<|start_header_id|>{{ tools }}", LLAMA3),
        ("{{ '<|python_tag|>' }}", LLAMA3),
        ("{{ messages }}", HERMES),
        (None, HERMES),
    ],
)
def test_the_template_says_how_calls_are_written(template: str | None, style: ToolFormat) -> None:
    assert choose_format("auto", template) is style
    assert choose_format("mistral", template) is MISTRAL


def test_a_template_without_tools_gets_them_explained() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12"},
    ]
    assert not knows_tools("{{ messages }}") and knows_tools("{% if tools %}")
    system, said, result = with_tool_prompt(messages, [tool])
    assert system["content"].startswith("Be brief.\n\n") and json.dumps(tool) in system["content"]
    assert said["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\n12\n</tool_response>"}


def split(text: str, step: int, *, open_in_prompt: bool = False) -> tuple[str, str]:
    splitter, said = ReasoningSplitter(open_in_prompt=open_in_prompt), list[Say]()
    for start in range(0, len(text), step):
        said += splitter.feed(text[start : start + step])
    said += splitter.end()
    return tuple("".join(say.text for say in said if say.kind == kind) for kind in ("reasoning", "content"))  # type: ignore[return-value]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thoughts_are_split_from_the_answer(step: int) -> None:
    assert split("<think>\nhm\n</think>\n\nyes\n", step) == ("hm\n", "yes\n")
    assert split("hm</think>yes", step, open_in_prompt=True) == ("hm", "yes")
    assert split("no thoughts <think>x</think>", step) == ("", "no thoughts <think>x</think>")
    assert split(" \n<think>cut o", step) == ("cut o", "")
    assert split("<thin", step) == ("", "<thin")
    assert split("a </thin b", step, open_in_prompt=True) == ("a </thin b", "")


def test_who_thinks() -> None:
    assert thinks("auto", "x <think> y") and not thinks("auto", "x") and not thinks("auto", None)
    assert thinks("qwen3", None) and not thinks("none", "<think>")


def test_blocks_follow_each_other() -> None:
    blocks = Blocks()
    steps = blocks.feed(
        [Say("reasoning", "r"), Say("content", "\n"), Say("content", "c"), CallBegins(0, "i", "f")]
    )
    steps += blocks.feed([CallArguments(0, "{}"), Say("content", " ")])
    steps += blocks.end()
    assert [(step.what, step.block.kind, step.text) for step in steps] == [
        ("open", "reasoning", ""), ("delta", "reasoning", "r"), ("close", "reasoning", ""),
        ("open", "content", ""), ("delta", "content", "\nc"), ("close", "content", ""),
        ("open", "call", ""), ("delta", "call", "{}"), ("close", "call", ""),
    ]  # fmt: skip
