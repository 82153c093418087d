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
    ("Use <function=f> in text", "Use <function=f> in text", []),
    ("Use <function=f>", "Use <function=f>", []),
    ("<tool_call> <function=f> are its tags", "<tool_call> <function=f> are its tags", []),
    ("<function=other>\n<parameter=x>\n1\n</parameter>\n</function> is one",
     "<function=other>\n<parameter=x>\n1\n</parameter>\n</function> is one", []),
    ("<function=bare></function>", "", [("bare", {})]),
    ("<tool_call>\n<function=bare>\n", "", [("bare", {})]),
]  # fmt: skip


def read(parts: list[str], *, cut: bool = False, **more: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = XmlCallParser(SCHEMAS, **more)
    events = [event for part in parts for event in parser.feed(part)]
    _, said, calls = summed([*events, *parser.end(cut=cut)])
    return said, calls


@pytest.mark.parametrize(
    "text", [call(("text", "a </parameter> <b"), ("count", "4")), call(("yes", "true"), name="bare")]
)
def test_the_arguments_of_a_call_end_where_the_function_does(text: str) -> None:
    """An answer that reached its limit may lack parameters, so nothing closes its arguments but the tag."""
    ends = text.index("</function>") + len("</function>")
    whole = read([text])[1]
    for at in range(len(text) + 1):
        said, calls = read([text[:at]], cut=True)
        if at >= ends:
            assert (said, calls) == ("", whole)
        elif calls:
            assert said == "" and not calls[0][1].endswith("}")


def test_the_beginning_of_a_tag_is_text_where_the_answer_ended_by_itself() -> None:
    one = call(("count", "4"))
    assert read([f"{one} </tool"])[0] == read([f"{one} </tool"], cut=True)[0] == " </tool"
    assert read([one.removesuffix("call>")])[0] == "</tool_"
    assert read([f"{one}\n<tool_ca"])[0] == "\n<tool_ca" and read([f"{one}\n<tool_ca"], cut=True)[0] == ""


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
    assert summed([*XmlCallParser(SCHEMAS).feed("<function=f>\n<parameter=")])[2] == [("f", "{")]
    assert [event.text for event in parser.feed("line one") if hasattr(event, "text")] == ["line one"]


def test_one_call_where_one_is_asked_for() -> None:
    assert len(read([call() + call()], several=False)[1]) == 1


#: As pydantic, zod and servers of the model context protocol write the parameters of their tools.
NESTED: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Color": {"enum": ["red", 7]},
        "a/b~": {"type": "array"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Back"}]},
        "Back": {"allOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
    },
    "properties": {
        "ref": {"$ref": "#/$defs/Point"},
        "all": {"allOf": [{"$ref": "#/$defs/Point"}], "default": {}},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "escaped": {"$ref": "#/$defs/a~1b~0"},
        "beside": {"$ref": "#/properties/maybe/anyOf/0"},
        "loop": {"oneOf": [{"$ref": "#/$defs/Loop"}]},
        "color": {"$ref": "#/$defs/Color"},
        "const": {"const": 3}, "word": {"const": "3"}, "integer": {"type": "integer"}, "number": {"type": "number"},
        "untyped": {"properties": {"x": {}}}, "items": {"items": {}}, "lost": {"$ref": "#/$defs/Nowhere"},
        "remote": {"$ref": "https://example.org/schema"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("ref", '{"x": 1}', {"x": 1}),
        ("all", '{"x":1}', {"x": 1}),
        ("maybe", '{"x": 1}', {"x": 1}),
        ("maybe", "null", None),
        ("maybe", "no object", "no object"),
        ("escaped", "[1]", [1]),
        ("beside", "{}", {}),
        ("loop", "true", True),
        ("loop", "12", "12"),
        ("color", "7", 7),
        ("color", "red", "red"),
        ("const", "3", 3),
        ("word", "3", "3"),
        ("integer", "5.0", 5),
        ("integer", "-1e2", -100),
        ("integer", "5.5", "5.5"),
        ("integer", "1e999", "1e999"),
        ("number", "5.0", 5.0),
        ("untyped", '{"x": "y"}', {"x": "y"}),
        ("items", "[]", []),
        ("lost", "{}", "{}"),
        ("remote", "1", "1"),
        ("all", "[" * 5000, "[" * 5000),
    ],
)
@pytest.mark.parametrize(
    "schema", [NESTED, {"$ref": "#/$defs/Args", "$defs": {**NESTED["$defs"], "Args": NESTED}}]
)
def test_values_get_types_that_the_schema_names_elsewhere(
    schema: dict[str, Any], key: str, written: str, value: Any
) -> None:
    schema = {**schema, "properties": NESTED["properties"]} if key == "beside" else schema
    parser = XmlCallParser({"f": schema})
    _, _, calls = summed([*parser.feed(call((key, written))), *parser.end()])
    found = json.loads(calls[0][1])
    assert found == {key: value} and type(found[key]) is type(value)


@pytest.mark.parametrize(
    "schema",
    [
        5, [], "x", {"properties": 5}, {"properties": {"x": 5}}, {"properties": {"x": {"anyOf": 5}}},
        {"properties": {"x": {"type": [["x"]]}}}, {"properties": {"x": {"type": {"a": 1}}}},
        {"properties": {"x": {"enum": 3, "oneOf": [7, None]}}}, {"properties": {"x": {"$ref": ["a"]}}},
        {"$ref": "#"}, {"allOf": {"a": 1}, "properties": {"x": {"$ref": "#/properties/x/99999"}}},
    ],
)  # fmt: skip
def test_a_schema_that_makes_no_sense_says_nothing_of_types(schema: Any) -> None:
    parser = XmlCallParser({"f": schema})
    assert summed([*parser.feed(call(("x", "12"))), *parser.end()])[2] == [("f", '{"x": "12"}')]


def test_the_template_says_which_tags() -> None:
    assert choose_format("auto", "{{ '<tool_call>\\n<function=' }}") is QWEN_CODER
    assert choose_format("auto", "<tool_call> {{ tools }}") is HERMES
