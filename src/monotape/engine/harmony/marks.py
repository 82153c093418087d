"""The marks of harmony: tokens of their own, which no text of a user, a tool or a model can imitate."""

from __future__ import annotations

from monotape.engine.tokenizer import Tokenizer

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)

#: The engine writes it before the text of each special token: a code point that Unicode keeps out of all texts.
SPECIAL = "\ufdd0"


def speaks_harmony(tokenizer: Tokenizer | None, template: str | None) -> bool:
    """Whether a model answers on channels: its tokenizer has the marks, and its template, if any, writes them."""
    if tokenizer is None or any(tokenizer.id_of(mark) is None for mark in MARKS):
        return False
    return not template or all(mark in template for mark in (START, CHANNEL, MESSAGE))
