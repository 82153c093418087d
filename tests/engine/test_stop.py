"""Stop strings: the text before them, all of it, and nothing after."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monotape.engine.stop import StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    stream = StopStrings(stops, include=include)
    text = "".join(map(stream.push, pieces))
    return text + stream.flush(), stream.matched


def expected(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The definition: read on character by character until the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


few = st.text(alphabet="ab\n", min_size=1, max_size=4)


@given(st.lists(few, min_size=1, max_size=4), st.lists(st.text(alphabet="ab\n", max_size=3)), st.booleans())
@example(["abb", "b"], ["ab", "b"], False)
def test_any_cut_of_the_text_stops_at_the_same_place(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    assert run(stops, pieces, include) == expected(stops, "".join(pieces), include)


@given(st.lists(few, min_size=1, max_size=4), st.text(alphabet="ab\n", max_size=20))
def test_no_more_is_held_back_than_could_begin_a_stop_string(stops: list[str], text: str) -> None:
    stream = StopStrings(stops)
    out = ""
    for count, character in enumerate(text, start=1):
        out += stream.push(character)
        if stream.matched is not None:
            return
        held = text[:count].removeprefix(out)
        assert out + held == text[:count]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings([]).push("anything") == "anything"


def test_text_before_the_minimum_is_not_looked_at() -> None:
    stream = StopStrings(["END"])
    assert stream.push("END", check=False) == "END"
    assert stream.push("E") == ""
    assert stream.push("N", check=False) == "EN"
    assert (stream.push("END after"), stream.matched) == ("", "END")
    assert stream.push("more") == ""


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one\n\n")])
def test_the_stop_string_itself_is_kept_only_when_asked_for(include: bool, text: str) -> None:
    assert run(["\n\n"], ["on", "e\n", "\ntwo"], include) == (text, "\n\n")
