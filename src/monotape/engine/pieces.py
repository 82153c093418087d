"""The bytes that every token stands for, in the two ways that vocabularies spell them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WORD_START = "\u2581"  # how SentencePiece vocabularies write a space


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write a byte as one visible character: itself where it has a shape of its own,
    else the next free character from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in visible)
    return table | {chr(256 + index): byte for index, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_of_character()


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary's strings become bytes."""

    byte_level: bool  # characters stand for bytes; otherwise SentencePiece: text with WORD_START for a space
    byte_fallback: bool = False  # "<0x0A>" stands for the byte
    leading_spaces: int = 0  # spaces that encoding put in front of a text and decoding takes away

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token that is not spelled in bytes
                return token.encode("utf-8", "replace")
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(WORD_START, " ").encode("utf-8", "replace")


class Pieces:
    """Token id to bytes, worked out once for every id that comes up."""

    __slots__ = ("_known", "_token_of", "special", "spelling")

    def __init__(
        self, token_of: Callable[[int], str | None], spelling: Spelling, special: frozenset[int]
    ) -> None:
        self._token_of = token_of
        self._known: dict[int, bytes] = {}
        self.spelling = spelling
        self.special = special

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that only pads the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            token = self._token_of(token_id)
            known = b"" if token is None else self.spelling.to_bytes(token)
            self._known[token_id] = known
        return known
