"""Turns ids into text one at a time, never splitting a character and never taking text back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from monotape.engine.pieces import Pieces

_LONGEST_CHARACTER = 4  # bytes of UTF-8; no earlier token of a prompt can reach into its continuation


class Detokenizer:
    """One text in the making. What `push` and `flush` return, joined, is the text.

    With a `prompt` the text continues it: a character that the prompt's last tokens began is completed, and a
    leading space is part of the text. Without one, the space that encoding put in front is taken away. `special_mark`
    is written before each special token that is not skipped, so that a reader can tell it from text that looks like it.
    """

    __slots__ = ("_before", "_decoder", "_leading_spaces", "_mark", "_pieces", "_skip")

    def __init__(
        self,
        pieces: Pieces,
        *,
        skip_special: bool = True,
        prompt: Sequence[int] = (),
        special_mark: str = "",
    ) -> None:
        self._pieces = pieces
        self._mark = special_mark.encode()
        self._before = prompt[
            -_LONGEST_CHARACTER:
        ]  # read when the first token comes, not before the job starts
        self._skip = pieces.special if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = 0 if prompt else pieces.spelling.leading_spaces

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known; often all of it, sometimes nothing yet."""
        for earlier in self._before:
            self._decoder.decode(b"" if earlier in self._skip else self._pieces.bytes_of(earlier))
        self._before = ()
        text = self._text_of(token_id)
        return self._without_leading_spaces(text) if self._leading_spaces and text else text

    def flush(self) -> str:
        """The end of the text: a replacement character if the last tokens do not complete a character."""
        return self._decoder.decode(b"", final=True)

    def _text_of(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        spelled = self._pieces.bytes_of(token_id)
        if self._mark and token_id in self._pieces.special:
            spelled = self._mark + spelled
        return self._decoder.decode(spelled)

    def _without_leading_spaces(self, text: str) -> str:
        stripped = text.lstrip(" ")
        spaces = len(text) - len(stripped)
        kept = text[min(spaces, self._leading_spaces) :]
        self._leading_spaces = 0 if stripped else max(0, self._leading_spaces - spaces)
        return kept


def decode(pieces: Pieces, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """The text of a whole list of ids."""
    detokenizer = Detokenizer(pieces, skip_special=skip_special)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])
