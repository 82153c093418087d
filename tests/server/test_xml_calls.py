"""Qwen3-Coder's calls as tags: values get the types of their schema, and nothing is lost however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from monotape.server.conversation.tool_formats import HERMES, QWEN_CODER, choose_format
from monotape.server.conversation.xml_calls import XmlCallParser
from server.answers import cut_everywhere, summed

SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"}, "count": {"type": "integer"}, "real": {"type": "number"},
            "yes": {"type": "boolean"}, "list": {"type": "array"}, "object": {"type": "object"},
            "maybe": {"type": ["integer", "null"]}, "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "chosen": {"enum": ["a", "b"]},
        },
    },
    "bare": None,
}  # fmt: skip


def call(*values: tuple[str, str], name: str = "f") -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("only text < here", "only text < here", []),
    (call(("text", "Köln\nam Rhein \"q\" \\")), "", [("f", {"text": 'Köln\nam Rhein "q" \\'})]),
    (f"I look.\n{call(('count', '3'), ('text', ' x '))}", "I look.\n", [("f", {"count": 3, "text": " x "})]),
    (call(("real", "1.5e3"), ("yes", "true"), ("list", '[1, {"a": "</parameter>"}]')), "",
     [("f", {"real": 1500.0, "yes": True, "list": [1, {"a": "</parameter>"}]})]),
    (call(("yes", "True"), ("maybe", "None"), ("maybe", "7")), "", [("f", {"yes": True, "maybe": 7})]),
    (call(("either", "12"), ("either", "twelve"), ("chosen", "a")), "", [("f", {"either": "twelve", "chosen": "a"})]),
    (call(("count", "many"), ("object", "{broken")), "", [("f", {"count": "many", "object": "{broken"})]),
    (call(("text", "a </parameter> b"), ("text2", "12")), "", [("f", {"text": "a </parameter> b", "text2": "12"})]),
    (call(("text", "")), "", [("f", {"text": ""})]),
    (call(name="bare"), "", [("bare", {})]),
    (call(("x", "1"), name="unknown"), "", [("unknown", {"x": "1"})]),
    (f"{call(('count', '1'))}\n{call(('count', '2'))}\n", "", [("f", {"count": 1}), ("f", {"count": 2})]),
    ("<function=f>\n<parameter=count>\n4\n</parameter>\n</function>\n</tool_call>", "", [("f", {"count": 4})]),
    (call(("count", "4")).replace("</function>\n", ""), "", [("f", {"count": 4})]),
    ("<tool_call>\n<function=f>\n<parameter=count>\n4\n</parameter>\n", "", [("f", {"count": 4})]),
    (f"{call(('count', '4'))} And now?", " And now?", [("f", {"count": 4})]),
    ("<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>", []),
    ("the tag <function=", "the tag <function=", []),
    ("<tool_call>", "<tool_call>", []),
]  # fmt: skip


def read(parts: list[str], **more: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = XmlCallParser(SCHEMAS, **more)
    events = [event for part in parts for event in parser.feed(part)]
    _, said, calls = summed([*events, *parser.end()])
    return said, calls


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_calls_are_read_however_they_are_cut(text: str, said: str, calls: list[tuple[str, Any]]) -> None:
    for parts in cut_everywhere(text):
        content, found = read(parts)
        assert (content, [(name, json.loads(arguments)) for name, arguments in found]) == (said, calls), parts


def test_a_value_that_never_ends_is_given_as_far_as_it_came() -> None:
    assert read(["<tool_call>\n<function=f>\n<parameter=text>\nhalf of i"]) == (
        "",
        [("f", '{"text": "half of i')],
    )
    assert read(["<tool_call>\n<function=f>\n<parameter=list>\n[1, 2"]) == ("", [("f", '{"list": [1, 2')])


def test_text_streams_while_it_comes() -> None:
    parser = XmlCallParser(SCHEMAS)
    parser.feed("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert summed([*XmlCallParser(SCHEMAS).feed("<function=f>")])[2] == [("f", "{")]
    assert [event.text for event in parser.feed("line one") if hasattr(event, "text")] == ["line one"]


def test_one_call_where_one_is_asked_for() -> None:
    assert len(read([call() + call()], several=False)[1]) == 1


def test_the_template_says_which_tags() -> None:
    assert choose_format("auto", "{{ '<tool_call>\\n<function=' }}") is QWEN_CODER
    assert choose_format("auto", "<tool_call> {{ tools }}") is HERMES
