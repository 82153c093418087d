"""Drafts as a request asks for them: whether passes may check any, and the text that its answer may repeat.

Drafts never change an answer. A pass computes what follows each of them, and keeps those that would have been chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from monotape.backends.token_ids import TokenIds
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import RequestError

PredictionLike = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Whether passes may check drafts, and where these are looked up besides the prompt and the answer itself."""

    wanted: bool = True
    prediction: Sequence[int] = ()


def make_prediction(
    given: PredictionLike | None, tokenizer: Tokenizer | None, *, vocab: int, context: int
) -> Sequence[int]:
    """The tokens of a text that an answer is expected to repeat; it cannot repeat more than fits the context."""
    if given is None:
        return ()
    if isinstance(given, str):
        if tokenizer is None:
            raise RequestError("prediction is text, but this checkpoint has no tokenizer.", "Give token ids.")
        ids = TokenIds.of(tokenizer.encode_text(given))
    else:
        ids = _ids(given)
    if len(ids) and ids.array.view(np.uint32).max() >= vocab:  # a negative one is beyond every vocabulary
        raise RequestError(
            "prediction holds a token that the model does not have.", f"Token ids go from 0 to {vocab - 1}."
        )
    check_length(len(ids), context)
    return ids


def _ids(given: object) -> TokenIds:
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise RequestError(f"prediction is a {type(given).__name__}.", "Give a text, or a list of token ids.")
    try:
        return TokenIds.of(given)
    except (TypeError, OverflowError):
        raise RequestError("prediction holds what is no token id.", "Token ids are integers.") from None


def check_length(tokens: int, context: int, *, exact: bool = True) -> None:
    if tokens > context:
        least = "" if exact else "at least "
        raise RequestError(
            f"prediction has {least}{tokens} tokens, but the context has {context}.",
            "Leave out what the answer will not repeat.",
        )
