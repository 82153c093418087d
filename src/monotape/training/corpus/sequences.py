"""Packs documents into sequences of one length, half of their pieces rearranged to train filling in the middle.

A piece never crosses two sequences, so the prefix, the suffix and the middle of one are always seen together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

END, PREFIX, MIDDLE, SUFFIX = "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"
FILLED_SHARE = 0.5  # of the pieces
MIN_PIECE = 32  # tokens; less room than that at the end of a sequence is padded
SLACK = 12  # tokens by which three texts may be longer than one, three marks and an end included
MIN_FILLED = 64  # tokens of a piece that is cut in three
MAX_MIDDLE = 1200  # characters

Tokens = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document and its place in a sequence."""

    start: int  # token of the sequence
    room: int  # tokens it may take
    plain: Tokens
    parts: tuple[str, str, str] | None  # prefix, middle, suffix


class Packer:
    """Takes documents and gives rows of `length` tokens. The same documents and seed make the same rows."""

    def __init__(self, tokenizer: Any, length: int, seed: int, filled_share: float = FILLED_SHARE) -> None:
        marks = [tokenizer.token_to_id(mark) for mark in (END, PREFIX, MIDDLE, SUFFIX)]
        assert None not in marks, "prepare checks the tokenizer"
        self._end, self._prefix, self._middle, self._suffix = marks
        self._tokenizer, self._length, self._filled_share = tokenizer, length, filled_share
        self._random = random.Random(seed)
        self._sequence, self._used = 0, 0  # where the next piece starts
        self._waiting: list[tuple[int, Piece]] = []

    def add(self, text: str, encoding: Any, tokens: Tokens) -> None:
        """One document, with its tokens and the tokenizer's record of where each lies in the text."""
        start = 0
        while start < len(tokens):
            if self._length - self._used < MIN_PIECE:
                self._sequence, self._used = self._sequence + 1, 0
            start += self._take(text, encoding, tokens, start)

    def _take(self, text: str, encoding: Any, tokens: Tokens, start: int) -> int:
        room = self._length - self._used
        filled = self._random.random() < self._filled_share and room >= MIN_FILLED
        slack = SLACK if filled else 1  # an end
        count = min(len(tokens) - start, room - slack)
        if not filled and count < len(tokens) - start:
            count = room  # goes on in the next sequence, without an end
        last = start + count == len(tokens)
        plain = tokens[start : start + count]
        if last and count < room:
            plain = np.append(plain, np.uint16(self._end))
        parts = None
        if filled and count >= MIN_FILLED - SLACK:
            first, past = encoding.token_to_chars(start)[0], encoding.token_to_chars(start + count - 1)[1]
            parts = self._cut(text[first:past])
        taken = count + slack if parts is not None else len(plain)
        self._waiting.append((self._sequence, Piece(self._used, taken, plain, parts)))
        self._used += taken
        return count

    def _cut(self, text: str) -> tuple[str, str, str]:
        """Where the middle lies: anywhere, or, as often, the rest of a line and the lines after it."""
        start = self._random.randrange(len(text))
        longest = min(len(text) - start, MAX_MIDDLE)
        past = start + max(1, int(longest ** self._random.random()))  # short middles as likely as long ones
        if (
            self._random.random() < 0.5
            and (newline := text.find("\n", past)) >= 0
            and newline - start <= MAX_MIDDLE
        ):
            past = newline
        return text[:start], text[start:past], text[past:]

    def rows(self, *, last: bool = False) -> Iterator[Tokens]:
        """The sequences that are complete; with `last` the one that is not as well, padded."""
        ready = [(row, piece) for row, piece in self._waiting if last or row < self._sequence]
        self._waiting = [(row, piece) for row, piece in self._waiting if not last and row >= self._sequence]
        filled = self._filled([piece.parts for _, piece in ready if piece.parts is not None])
        current, made = -1, np.full(self._length, self._end, np.uint16)
        for row, piece in ready:
            if row != current and current >= 0:
                yield made
                made = np.full(self._length, self._end, np.uint16)
            current = row
            tokens = next(filled) if piece.parts is not None else piece.plain
            if len(tokens) > piece.room:  # a cut inside a long token: the piece stays as it was
                tokens = piece.plain[: piece.room]
            made[piece.start : piece.start + len(tokens)] = tokens
        if current >= 0:
            yield made

    def _filled(self, parts: Sequence[tuple[str, str, str]]) -> Iterator[Tokens]:
        encoded = self._tokenizer.encode_batch_fast([text for three in parts for text in three])
        ids = [encoding.ids for encoding in encoded]
        for prefix, middle, suffix in zip(ids[0::3], ids[1::3], ids[2::3], strict=True):
            joined = [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle, self._end]
            yield np.array(joined, np.uint16)
