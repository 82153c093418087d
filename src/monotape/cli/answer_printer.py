"""Prints an answer as it comes: words to standard output, thoughts to standard error."""

from __future__ import annotations

import sys
from typing import Any


class AnswerPrinter:
    """One answer. Thoughts end with a line break before the words that follow them."""

    def __init__(self) -> None:
        self.has_words = False
        self._thinking = False

    def show(self, delta: Any) -> None:
        """A part of an answer, of this engine or of a server."""
        if delta.reasoning:
            print(delta.reasoning, end="", file=sys.stderr, flush=True)
            self._thinking = True
        if delta.text:
            self.end_thoughts()
            print(delta.text, end="", flush=True)
            self.has_words = True

    def end_thoughts(self) -> None:
        if self._thinking:
            print(file=sys.stderr, flush=True)
            self._thinking = False
