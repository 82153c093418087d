"""Small vocabularies of both kinds, as a GGUF file would hold them."""

from __future__ import annotations

import dataclasses

from monotape.engine.pieces import BYTE_OF_CHARACTER, WORD_START
from monotape.weights.checkpoint import Vocabulary

_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def spelled(text: str) -> str:
    """A text in the characters of a byte-level vocabulary."""
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in text.encode())


def byte_level(pre: str = "gpt-2", *, add_bos: bool = False) -> Vocabulary:
    """All bytes, a few merges, three control tokens, a user-defined one and one that only pads."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "1 2", "12 3", "123 4", "Ġ Ġ"]
    merges += [f"{spelled('é')[0]} {spelled('é')[1]}"]
    tokens = [_CHARACTER_OF_BYTE[byte] for byte in range(256)]
    tokens += [merge.replace(" ", "") for merge in merges]
    special = ["<|bos|>", "<|end|>", "<|im_start|>", "<tool>", "[PAD]"]
    types = [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED, UNUSED]
    first = len(tokens)
    return Vocabulary(
        model="gpt2", pre=pre, tokens=(*tokens, *special), types=tuple(types), scores=(),
        merges=tuple(merges), add_bos=add_bos, add_space_prefix=False, bos_id=first, eos_id=first + 1,
        unknown_id=None,
    )  # fmt: skip


def sentencepiece(*, add_space_prefix: bool = True, add_bos: bool = True) -> Vocabulary:
    """Unknown, BOS, EOS, all bytes, then pieces that can be cut in more than one way."""
    pieces = [
        "ab",
        "bc",
        "abc",
        f"{WORD_START}a",
        f"{WORD_START}ab",
        "cab",
        f"{WORD_START}{WORD_START}",
        "éa",
        "ca",
    ]
    letters = [WORD_START, "a", "b", "c", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return Vocabulary(
        model="llama", pre="default", tokens=tuple(tokens), types=tuple(types), scores=tuple(scores),
        merges=(), add_bos=add_bos, add_space_prefix=add_space_prefix, bos_id=1, eos_id=2, unknown_id=0,
    )  # fmt: skip


def changed(vocabulary: Vocabulary, **fields: object) -> Vocabulary:
    return dataclasses.replace(vocabulary, **fields)  # type: ignore[arg-type]
