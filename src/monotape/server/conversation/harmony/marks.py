"""The marks of harmony: tokens of their own, which no text of a user, a tool or a model can imitate."""

from __future__ import annotations

from monotape.engine.tokenizer import Tokenizer

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)

#: The engine writes it before the text of each special token: a code point that Unicode keeps out of all texts.
SPECIAL = "\ufdd0"


def is_harmony(template: str | None) -> bool:
    """Whether a template writes channels."""
    source = template or ""
    return CHANNEL in source and MESSAGE in source and START in source


def has_marks(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is not None and all(tokenizer.id_of(mark) is not None for mark in MARKS)
