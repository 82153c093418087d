"""The units by which a conversation is recognised: a further turn begins with all units of the turn before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from monotape.cluster.forwarded import Unit
from monotape.cluster.units import units_of

CHAT = "/v1/chat/completions"


def units(path: str, **body: Any) -> tuple[Unit, ...]:
    return units_of(path, json.dumps(body).encode())


def said(*texts: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [
        (CHAT, {"messages": said("a")}, {"messages": said("a", "b", "c")}),
        (
            "/v1/messages",
            {"system": "s", "messages": said("a")},
            {"system": "s", "messages": said("a", "b", "c")},
        ),
        (
            "/v1/responses",
            {"instructions": "s", "input": "a"},
            {"instructions": "s", "input": said("a", "b", "c")},
        ),
        ("/v1/completions", {"prompt": "x" * 130}, {"prompt": "x" * 130 + "y" * 90}),
        ("/v1/completions", {"prompt": list(range(40))}, {"prompt": list(range(80))}),
    ],
)
def test_a_further_turn_begins_like_the_turn_before(path: str, first: Any, second: Any) -> None:
    before, after = units(path, **first), units(path, **second)
    assert before and len(before) < len(after)
    assert after[: len(before)] == before


def test_other_settings_of_a_request_do_not_matter() -> None:
    assert units(CHAT, messages=said("a"), temperature=0, stream=True) == units(
        CHAT, messages=said("a"), model="m"
    )


def test_tools_and_instructions_come_before_the_messages() -> None:
    tool = [{"type": "function", "function": {"name": "look"}}]
    plain, with_tools = units(CHAT, messages=said("a")), units(CHAT, messages=said("a"), tools=tool)
    assert not {unit.key for unit in plain} & {unit.key for unit in with_tools}


def test_a_unit_stands_for_everything_before_it() -> None:
    one, other = units(CHAT, messages=said("a", "b", "c")), units(CHAT, messages=said("x", "b", "c"))
    assert not {unit.key for unit in one} & {unit.key for unit in other}
    joined, split = units(CHAT, messages=said("ab", "c")), units(CHAT, messages=said("a", "bc"))
    assert joined[-1].key != split[-1].key


def test_marks_that_move_from_turn_to_turn_are_left_out() -> None:
    """Claude Code marks the last message for the cache, and its billing header differs in every request."""

    def turn(mark: bool, bill: str) -> tuple[Unit, ...]:
        block = {"type": "text", "text": "hi", **({"cache_control": {"type": "ephemeral"}} if mark else {})}
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: {bill}"},
            {"type": "text", "text": "s"},
        ]
        return units("/v1/messages", system=system, messages=[{"role": "user", "content": [block]}])

    assert turn(True, "cch=1") == turn(False, "cch=2")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b""), ("/tokenize", b'{"prompt": "a"}'), (CHAT, b"{"), (CHAT, b"\xff"), (CHAT, b"[1]"),
        (CHAT, b'{"messages": 3}'), (CHAT, b"[" * 100_000),
    ],
)  # fmt: skip
def test_what_has_no_prompt_has_no_units(path: str, body: bytes) -> None:
    assert units_of(path, body) == ()
