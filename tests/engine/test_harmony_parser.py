"""Answers in harmony, right and wrong, however their stream is cut: everything that was written is shown."""

from __future__ import annotations

import re
from typing import Any

import pytest

from monotape.engine.detokenizer import Detokenizer
from monotape.engine.harmony.marks import SPECIAL
from monotape.engine.harmony.parser import Channels, HarmonyParser
from monotape.engine.pieces import Pieces, Spelling
from server.answers import cut_everywhere, summed

F = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "ü}"}<|call|>'
ARGUMENTS = '{"a": "ü}"}'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
     "Hm.", "Yes.", []),
    (f"<|channel|>analysis<|message|>I call.<|end|>{F}", "I call.", "", [("f", ARGUMENTS)]),
    (f"<|channel|>commentary<|message|>I look it up.<|end|>{F}{F}", "", "I look it up.", [("f", ARGUMENTS)] * 2),
    (" to=functions.g<|channel|>commentary json<|message|>{}<|call|>", "", "", [("g", "{}")]),
    ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", "", "", [("f", "{}")]),
    ("<|channel|>commentary to=f<|message|>{}<|call|>", "", "", [("f", "{}")]),
    ("<|channel|>commentary to=functions.g<|message|><|call|>", "", "", [("g", "{}")]),
    ("<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{}", "", "", [("f", "{}")]),
    # A call that never closes, and one for a tool that was not offered.
    ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b', "", "", [("f", '{"a": "b')]),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", "", "", [("other", "{}")]),
    ("<|channel|>commentary to=python<|message|>print(1)<|call|>", "", "print(1)", []),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
    # Channels in the wrong order, an unknown one, none, and other roles.
    ("<|channel|>final<|message|>Yes.<|end|><|start|>assistant<|channel|>analysis<|message|>Why?<|end|>",
     "Why?", "Yes.", []),
    ("<|channel|>weird<|message|>shown<|end|>", "", "shown", []),
    ("<|message|>no channel<|return|>", "", "no channel", []),
    ("just words, <no> marks\nat all", "", "just words, <no> marks\nat all", []),
    ("<|channel|>analysis<|message|>a<|end|>stray<|start|>user<|message|>fake", "a", "strayfake", []),
    ("<|channel|>analysis<|message|>no end<|channel|>final<|message|>Yes.", "no end", "Yes.", []),
    ("<|channel|>analysis<|message|>a<|end|>\n<|start|>assistant<|channel|>final<|message|>b", "a", "b", []),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}", []),
    ("<|channel|>final<|message|>a<|reserved_200013|>b<|constrain|>c", "", "a<|reserved_200013|>b<|constrain|>c", []),
    # Headers that lead nowhere.
    ("<|channel|>", "", "", []),
    ("<|channel|>final", "", "", []),
    ("<|channel|>commentary to=functions.f", "", "", []),
    ("<|channel|>final and on without a message", "", "<|channel|>final and on without a message", []),
    ("<|channel|>final\nan answer in the header<|end|>", "", "<|channel|>final\nan answer in the header", []),
]  # fmt: skip


def special(text: str) -> str:
    """As the engine writes tokens of their own."""
    return re.sub(r"<\|[a-z_0-9]+\|>", lambda found: SPECIAL + found[0], text)


def read(parts: list[str], offered: tuple[str, ...] = ("f", "g"), **more: Any) -> Any:
    parser = HarmonyParser(Channels(offered=frozenset(offered), **more))
    events = [event for part in parts for event in parser.feed(part)]
    return summed([*events, *parser.end()])


@pytest.mark.parametrize(("text", "thought", "said", "calls"), CASES)
def test_answers_are_read_however_they_are_cut(text: str, thought: str, said: str, calls: Any) -> None:
    for parts in cut_everywhere(special(text)):
        assert read(parts) == (thought, said, calls), parts


def test_marks_that_are_only_text_stay_text() -> None:
    text = f"{special('<|channel|>final<|message|>')}A message ends with <|end|>, then <|start|>assistant"
    for parts in cut_everywhere(text):
        assert read(parts) == ("", "A message ends with <|end|>, then <|start|>assistant", [])


def test_half_of_a_mark_at_the_end_is_text() -> None:
    assert read([special("<|channel|>final<|message|>a"), f"{SPECIAL}<|en"]) == ("", "a<|en", [])


def test_without_tools_a_call_is_text() -> None:
    found = read([special("<|channel|>commentary to=functions.f<|message|>{}<|call|>")], offered=())
    assert found == ("", "{}", [])


def test_thoughts_that_are_not_told_apart_are_text_with_their_marks() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    for parts in cut_everywhere(special(thought + final)):
        assert read(parts, thoughts=False) == ("", f"{thought}Yes.", [])
    assert read([special(f"{thought}{F}")], thoughts=False) == ("", thought, [("f", ARGUMENTS)])
    cut_short = "<|channel|>analysis<|message|>Hm"
    assert read([special(cut_short)], thoughts=False) == ("", cut_short, [])


def test_one_call_where_one_is_asked_for() -> None:
    assert read([special(F + F)], several=False)[2] == [("f", ARGUMENTS)]


def test_an_answer_can_be_opened_by_its_prompt() -> None:
    final = special("<|channel|>final<|message|>")
    assert read(['{"a": 1}'], opened=final) == ("", '{"a": 1}', [])
    forced = special("<|channel|>commentary to=functions.")
    assert read([special("f <|constrain|>json<|message|>{}")], opened=forced) == ("", "", [("f", "{}")])


def test_events_come_as_soon_as_they_are_certain() -> None:
    parser = HarmonyParser(Channels(offered=frozenset({"f"})))
    assert summed(parser.feed(special("<|channel|>analysis<|message|>I th"))) == ("I th", "", [])
    parser.feed(special("<|end|>"))
    assert summed(
        parser.feed(special('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a'))
    )[2] == [("f", '{"a')]


def test_the_engine_marks_special_tokens_and_no_others() -> None:
    tokens = ["<|end|>", "<", "|", "end", "|", ">", "é"[:1]]
    pieces = Pieces(lambda index: tokens[index], Spelling(byte_level=False), frozenset({0}))
    made = Detokenizer(pieces, skip_special=False, special_mark=SPECIAL)
    assert "".join(map(made.push, [1, 2, 3, 4, 5, 0])) == f"<|end|>{SPECIAL}<|end|>"
