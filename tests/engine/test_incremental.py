"""Parts of a text that were seen before have their ids already; the ids are those of the whole text."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import real_tokenizers
from engine.vocabularies import CONTROL, byte_level, changed, sentencepiece
from monotape.engine.incremental import IncrementalEncoder
from monotape.engine.tokenizer import Tokenizer
from monotape.weights.checkpoint import TextAssets, Vocabulary


def made(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = Tokenizer.from_assets(TextAssets(vocabulary=vocabulary))
    assert tokenizer is not None
    return tokenizer


BYTES, PIECES = made(byte_level()), made(sentencepiece())
SPECIAL = ["<|bos|>", "<|end|>", "<|im_start|>", "<tool>", "<|im_", "start|>", "<s>", "</s>"]
TEXTS = st.lists(
    st.sampled_from([*SPECIAL, " ", "\n", "hello", " world", "ab", "abc", "é", "1234", "  "]), max_size=12
)


@given(TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte level", "SentencePiece"])
def test_the_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    encoder, text = IncrementalEncoder(tokenizer), "".join(parts)
    expected = tokenizer.encode(text, add_special=False)
    assert list(encoder.encode(text)) == expected
    assert list(encoder.encode(text)) == expected  # from what is known by now


@given(TEXTS)
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("vocabulary", [byte_level, sentencepiece])
def test_with_special_tokens_too(
    vocabulary: Callable[..., Vocabulary], add_bos: bool, parts: list[str]
) -> None:
    tokenizer = with_bos(vocabulary, add_bos)
    encoder, text = IncrementalEncoder(tokenizer), "".join(parts)
    for _ in range(2):
        assert list(encoder.encode(text, add_special=True)) == tokenizer.encode(text)


@functools.cache
def with_bos(vocabulary: Callable[..., Vocabulary], add_bos: bool) -> Tokenizer:
    return made(vocabulary(add_bos=add_bos))


@pytest.mark.slow
@pytest.mark.parametrize("name", real_tokenizers.PACKAGES)
def test_with_the_special_tokens_of_real_files(name: str) -> None:
    tokenizer = real_tokenizers.tokenizer(name)
    encoder = IncrementalEncoder(tokenizer)
    for text in ("", "a", " hello\n", "<|endoftext|>x", "<|im_start|>user\n42<|im_end|>"):
        assert list(encoder.encode(text, add_special=True)) == tokenizer.encode(text)


def overlapping() -> Tokenizer:
    """Special tokens that begin like one another: what follows a cut decides which one is found there."""
    plain, more = byte_level(), ("<|a|>", "<|a|><|b|>", "<|b|>", "<|b|>c", "|>")
    return made(changed(plain, tokens=(*plain.tokens, *more), types=(*plain.types, *[CONTROL] * len(more))))


OVERLAPPING = overlapping()
CLOSE = st.lists(st.sampled_from(["<|a|>", "<|b|>", "<|", "a", "|>", "c", " ", "hello"]), max_size=10)


@given(st.lists(CLOSE, min_size=1, max_size=4))
def test_a_text_that_begins_like_an_earlier_one_has_its_own_ids(turns: list[list[str]]) -> None:
    encoder, text = IncrementalEncoder(OVERLAPPING), ""
    for turn in turns:
        for said in (text + "".join(turn), text + "".join(reversed(turn))):  # one goes on, one departs
            assert list(encoder.encode(said)) == OVERLAPPING.encode(said, add_special=False)
        text += "".join(turn)


class Counted(IncrementalEncoder):
    """Counts the characters that it had to encode."""

    def __init__(self, tokenizer: Tokenizer, kept_characters: int = 10**6) -> None:
        super().__init__(tokenizer, kept_characters)
        self.encoded = 0

    def _ids(self, part, marked, encode):  # type: ignore[no-untyped-def]
        def counted(text: str) -> list[int]:
            self.encoded += len(text)
            return encode(text)  # type: ignore[no-any-return]

        return super()._ids(part, marked, counted)


class Looked(IncrementalEncoder):
    """Counts the characters that it looked up."""

    looked = 0

    def _ids(self, part, marked, encode):  # type: ignore[no-untyped-def]
        self.looked += len(part)
        return super()._ids(part, marked, encode)


def test_only_what_is_new_is_encoded() -> None:
    encoder = Counted(BYTES)
    turns = [f"<|im_start|>user says hello world {number} times, and more" for number in range(9)]
    encoder.encode("".join(turns))
    before = encoder.encoded
    encoder.encode("".join([*turns, "<|im_start|>and a new turn, as long as that"]))
    assert encoder.encoded - before == len("<|im_start|>and a new turn, as long as that")
    encoder.encode("".join(["<|im_start|>another beginning of some length", *turns]))
    assert encoder.encoded - before == len("<|im_start|>and a new turn, as long as that") + len(
        "<|im_start|>another beginning of some length"
    )


def test_what_is_kept_is_bounded() -> None:
    encoder = Counted(BYTES, kept_characters=600)
    for number in range(50):
        encoder.encode(f"<|im_start|>turn number {number:04} of many, many turns")
    assert encoder._characters <= 600 and len(encoder._known) <= 4
    encoder.encode("<|im_start|>turn number 0049 of many, many turns")
    assert encoder.encoded == 50 * len("<|im_start|>turn number 0049 of many, many turns")


def test_the_next_turn_looks_nothing_up_of_the_turns_before() -> None:
    encoder = Looked(BYTES)
    turns = [f"<|im_start|>user says hello world {number} times, and more" for number in range(9)]
    for count in range(1, 10):
        encoder.looked = 0
        encoder.encode("".join(turns[:count]))
        assert encoder.looked <= 2 * len(turns[0])  # the new turn, and the one that may have gone on


def test_beginnings_are_bounded() -> None:
    for limit, most in ((1000, 15), (10**6, 64)):
        encoder = IncrementalEncoder(BYTES, kept_characters=limit)
        for number in range(100):
            encoder.encode(
                f"<|im_start|>conversation {number:04}, which goes on and on<|im_start|>for ever and ever"
            )
        assert sum(len(kept.text) for kept in encoder._beginnings) <= limit
        assert 1 <= len(encoder._beginnings) <= most
    encoder = IncrementalEncoder(BYTES)
    for count in range(1, 40):  # a conversation is kept once, however many turns it has
        encoder.encode("<|im_start|>one more turn of it" * count)
    assert len(encoder._beginnings) == 1


def test_special_tokens_count_only_where_they_are_meant() -> None:
    encoder = IncrementalEncoder(BYTES)
    text = "a<|end|>b"
    spelled = encoder.encode_spans([(text, False)])
    assert BYTES.decode(list(spelled), skip_special=False) == text and len(spelled) > 3
    assert list(encoder.encode_spans([("a", False), ("<|end|>", True), ("b", False)])) == BYTES.encode(
        text, add_special=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(real_tokenizers.PACKAGES))
def test_real_tokenizers_are_cut(name: str) -> None:
    tokenizer = real_tokenizers.tokenizer(name)
    encoder = IncrementalEncoder(tokenizer)
    assert encoder._cuts is not None
    marks = [token.content for token in tokenizer.added_tokens[:6]]
    text = (
        "".join(f"{mark}user\n Größe 🙂  {mark} \n\n{number}it's\t" for number, mark in enumerate(marks)) * 3
    )
    assert list(encoder.encode(text)) == tokenizer.encode(text, add_special=False)
