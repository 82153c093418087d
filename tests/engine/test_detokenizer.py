"""Ids to text, one at a time: nothing split, nothing taken back, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.vocabularies import byte_level, sentencepiece
from monotape.engine.detokenizer import Detokenizer, decode
from monotape.engine.gguf_tokenizer import build
from monotape.engine.pieces import Pieces, Spelling
from monotape.weights.checkpoint import Vocabulary

BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
PIECES = {"gpt2": build(BYTE_LEVEL)[1], "llama": build(SENTENCEPIECE)[1]}


@st.composite
def ids_of(draw: st.DrawFn) -> tuple[Vocabulary, list[int]]:
    vocabulary = draw(st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
    return vocabulary, draw(st.lists(st.integers(0, len(vocabulary.tokens) + 3), max_size=40))


@given(ids_of(), st.booleans())
def test_the_increments_are_the_whole_text(case: tuple[Vocabulary, list[int]], skip: bool) -> None:
    """The whole text decoded at once, as bytes, is the definition."""
    vocabulary, ids = case
    pieces = PIECES[vocabulary.model]
    spoken = [index for index in ids if not (skip and index in pieces.special)]
    whole = b"".join(map(pieces.bytes_of, spoken)).decode("utf-8", "replace")
    expected = whole.removeprefix(" ") if vocabulary.model == "llama" else whole
    detokenizer = Detokenizer(pieces, skip_special=skip)
    increments = [detokenizer.push(index) for index in ids]
    assert "".join(increments) + detokenizer.flush() == expected
    assert decode(pieces, ids, skip_special=skip) == expected


@given(st.text(max_size=30))
def test_real_text_never_shows_a_replacement_character(text: str) -> None:
    for vocabulary in (BYTE_LEVEL, SENTENCEPIECE):
        core, pieces = build(vocabulary)
        ids = core.encode(text, add_special_tokens=False).ids
        detokenizer = Detokenizer(pieces)
        increments = [detokenizer.push(index) for index in ids]
        shown = "".join(increments)
        assert shown == text
        assert detokenizer.flush() == ""


@given(ids_of())
def test_text_agrees_with_the_library_where_both_are_defined(case: tuple[Vocabulary, list[int]]) -> None:
    """tokenizers' own byte-level decoder, on any ids."""
    from tokenizers import decoders

    vocabulary, ids = case
    if vocabulary.model == "gpt2":
        known = [index for index in ids if PIECES["gpt2"].bytes_of(index)]
        expected = decoders.ByteLevel().decode([vocabulary.tokens[index] for index in known])
        assert decode(PIECES["gpt2"], known, skip_special=False) == expected


def test_a_character_appears_only_with_its_last_byte() -> None:
    detokenizer = Detokenizer(PIECES["gpt2"])
    assert [detokenizer.push(byte) for byte in "€!".encode()] == ["", "", "€", "!"]


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    detokenizer = Detokenizer(PIECES["gpt2"])
    assert [detokenizer.push(byte) for byte in "a€".encode()[:3]] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_an_impossible_byte_is_replaced_where_it_stands() -> None:
    detokenizer = Detokenizer(PIECES["gpt2"])
    assert [detokenizer.push(byte) for byte in (0x41, 0xE2, 0x42)] == ["A", "", "\ufffdB"]


def test_a_text_that_continues_a_prompt_keeps_its_space_and_completes_its_character() -> None:
    pieces, tokens = PIECES["llama"], SENTENCEPIECE.tokens
    word, prompt = tokens.index("\u2581a"), [tokens.index("b")]
    assert Detokenizer(pieces).push(word) == "a"
    assert Detokenizer(pieces, prompt=prompt).push(word) == " a"
    euro = [tokens.index(f"<0x{byte:02X}>") for byte in "€".encode()]
    continued = Detokenizer(pieces, prompt=[*prompt, *euro[:2]])
    assert continued.push(euro[2]) == "€"


@pytest.mark.parametrize(("spaces", "expected"), [(0, "   a"), (1, "  a"), (2, " a"), (5, "a")])
def test_as_many_leading_spaces_go_as_encoding_added(spaces: int, expected: str) -> None:
    tokens = ["\u2581", "\u2581\u2581", "a"]
    pieces = Pieces(tokens.__getitem__, Spelling(False, leading_spaces=spaces), frozenset())
    assert decode(pieces, [0, 1, 2]) == expected


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [BYTE_LEVEL.tokens.index(token) for token in ("<|im_start|>", "hello", "<tool>", "<|end|>")]
    assert decode(PIECES["gpt2"], ids) == "hello<tool>"
    assert decode(PIECES["gpt2"], ids, skip_special=False) == "<|im_start|>hello<tool><|end|>"
