"""Tokenizers built from GGUF vocabularies: how text is cut, merged and refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.vocabularies import CONTROL, byte_level, changed, sentencepiece, spelled
from monotape.engine.gguf_tokenizer import PRE_TOKENIZERS, build
from monotape.engine.pieces import WORD_START
from monotape.errors import CheckpointError
from monotape.weights.checkpoint import Vocabulary

TRICKY = "I'LL pay 12345 for HTMLParser!!\n\n  don't"
GPT2 = ["I", "'", "LL", " pay", " 12345", " for", " HTMLParser", "!!", "\n\n ", " don", "'t"]
ONE_DIGIT = [
    "I",
    "'LL",
    " pay",
    " ",
    "1",
    "2",
    "3",
    "4",
    "5",
    " for",
    " HTMLParser",
    "!!\n\n",
    " ",
    " don",
    "'t",
]
THREE_DIGITS = ["I", "'LL", " pay", " ", "123", "45", " for", " HTMLParser", "!!\n\n", " ", " don", "'t"]
CASED = [" for", " HTMLParser", "!!\n\n", " ", " don"]
CUTS = {
    "gpt-2": GPT2,
    "smollm": [*GPT2[:4], " ", "1", "2", "3", "4", "5", *GPT2[5:]],
    "llama-bpe": THREE_DIGITS,
    "dbrx": THREE_DIGITS,
    "qwen2": ONE_DIGIT,
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", *CASED, "'t"],
    "gpt-4o": ["I'LL", " pay", " ", "123", "45", " for", " HTMLParser", "!!\n\n", " ", " don't"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_the_pre_tokenizer_says(pre: str) -> None:
    core, _ = build(byte_level(pre))
    cut = [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(TRICKY)]
    assert cut == [spelled(piece) for piece in CUTS[pre]]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_pre_tokenizer_loses_text(pre: str) -> None:
    core, pieces = build(byte_level(pre))
    text = "naïve  Ünïcode 你好 日本語 한국어 😀👨‍👩‍👧 ½²\t\r\n\n   end \u00a0\u3000\u200b"
    ids = core.encode(text, add_special_tokens=False).ids
    assert b"".join(map(pieces.bytes_of, ids)).decode() == text


def test_merges_apply_in_their_order_and_whole_words_only_where_the_pre_tokenizer_allows() -> None:
    tokens = lambda pre, text: build(byte_level(pre))[0].encode(text, add_special_tokens=False).tokens  # noqa: E731
    assert tokens("gpt-2", "hello world") == ["hello", "Ġw", "or", "ld"]
    vocabulary = byte_level("llama-bpe")
    known = changed(vocabulary, tokens=(*vocabulary.tokens, "olleh"), types=(*vocabulary.types, 1))
    assert build(known)[0].encode("olleh", add_special_tokens=False).tokens == ["olleh"]
    assert build(changed(known, pre="qwen2"))[0].encode("olleh").tokens == ["o", "ll", "e", "h"]


def test_qwen_composes_characters_and_smollm_does_not() -> None:
    decomposed = "e\u0301"
    for pre, expected in (("qwen2", "é"), ("smollm", decomposed)):
        core, pieces = build(byte_level(pre))
        assert b"".join(map(pieces.bytes_of, core.encode(decomposed).ids)).decode() == expected


def test_special_tokens_are_found_in_text_and_never_merged_with_it() -> None:
    core, pieces = build(byte_level())
    encoded = core.encode("<|im_start|>he<tool>llo<|end|>", add_special_tokens=False)
    assert encoded.tokens == ["<|im_start|>", "he", "<tool>", "ll", "o", "<|end|>"]
    assert {core.id_to_token(index) for index in pieces.special} == {"<|bos|>", "<|end|>", "<|im_start|>"}


def test_a_token_that_only_pads_has_no_text() -> None:
    vocabulary = byte_level()
    _, pieces = build(vocabulary)
    assert pieces.bytes_of(vocabulary.tokens.index("[PAD]")) == b""
    assert pieces.bytes_of(len(vocabulary.tokens) + 5) == b""


def plain_sentencepiece(vocabulary: Vocabulary, text: str) -> list[str]:
    """The algorithm as it is defined: join the best-scored pair of neighbours until none is known."""
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    pieces = list((WORD_START if vocabulary.add_space_prefix else "") + text.replace(" ", WORD_START))
    while True:
        joins = [(-score[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in score]
        if not joins:
            break
        at = min(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    known = set(vocabulary.tokens)
    return [
        part
        for piece in pieces
        for part in ([piece] if piece in known else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


@given(st.text(alphabet="abc é中", min_size=1, max_size=24), st.booleans())
def test_merges_from_scores_do_what_sentencepiece_does(text: str, add_space_prefix: bool) -> None:
    vocabulary = sentencepiece(add_space_prefix=add_space_prefix)
    core, _ = build(vocabulary)
    assert core.encode(text, add_special_tokens=False).tokens == plain_sentencepiece(vocabulary, text)


def test_phi3_turn_marks_swallow_the_line_end_after_them() -> None:
    plain = sentencepiece(add_space_prefix=False)
    marks = ("<|user|>", "<|placeholder1|>", "<|endoftext|>")
    vocabulary = changed(
        plain,
        tokens=(*plain.tokens, *marks),
        types=(*plain.types, *[CONTROL] * 3),
        scores=(*plain.scores, 0.0, 0.0, 0.0),
    )
    encoded = build(vocabulary)[0].encode("<|user|>\n ab<|endoftext|>\na", add_special_tokens=False)
    assert [vocabulary.tokens[index] for index in encoded.ids] == [
        "<|user|>",
        "ab",
        "<|endoftext|>",
        "<0x0A>",
        "a",
    ]


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (byte_level("no-such-pre"), "'no-such-pre'.*gpt-2.*llama-bpe.*qwen2.*smollm"),
        (changed(byte_level(), model="bert"), "'bert'.*gpt2, llama"),
        (changed(byte_level(), merges=("he",)), "'he' is not a pair"),
        (changed(byte_level(), merges=("he zzz",)), "cannot be used"),
        (changed(sentencepiece(), scores=(0.0,)), "tokens but 1 scores"),
    ],
    ids=["pre", "model", "merge", "unknown merge", "scores"],
)
def test_what_cannot_be_is_refused_by_name(vocabulary: Vocabulary, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        build(vocabulary)
    assert caught.value.hint
