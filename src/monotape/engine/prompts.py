"""What may be given as a prompt, and its token ids, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monotape.backends.token_ids import TokenIds
from monotape.engine.harmony.parser import Channels
from monotape.engine.incremental import IncrementalEncoder
from monotape.errors import RequestError

PromptLike = str | Mapping[str, Any] | Sequence[int]

_FORMS = (
    'Give a string, {"prompt": "..."}, {"prompt_token_ids": [1, 2, 3]}, a list of ids, or a list of those.'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to run. `text` is None when it was given as ids."""

    text: str | None
    ids: TokenIds
    channels: Channels | None = None  # None: the answer is all text


def split_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or _are_ids(prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"A prompt is a {type(prompts).__name__}.", _FORMS)
    if not prompts:
        raise RequestError("There is no prompt.", _FORMS)
    return list(prompts)  # type: ignore[arg-type]


def make_prompt(given: PromptLike, encoder: IncrementalEncoder | None, vocab: int) -> Prompt:
    """The prompt that was given, in tokens."""
    if isinstance(given, Mapping):
        unknown = set(given) - {"prompt", "prompt_token_ids"}
        if unknown or not given:
            name = next(iter(unknown), "")
            raise RequestError(f"A prompt may not have the field {name!r}.", _FORMS)
        if "prompt_token_ids" in given:
            return Prompt(given.get("prompt"), checked_ids(given["prompt_token_ids"], vocab))
        given = given["prompt"]
    if isinstance(given, str):
        return text_prompt(given, encoder, vocab)
    return Prompt(None, checked_ids(given, vocab))


def text_prompt(text: str, encoder: IncrementalEncoder | None, vocab: int) -> Prompt:
    if encoder is None:
        raise without_tokenizer()
    return Prompt(text, checked_ids(encoder.encode(text, add_special=True), vocab))


def without_tokenizer() -> RequestError:
    return RequestError(
        "This checkpoint has no tokenizer, so it cannot read text.",
        "Give token ids (prompt_token_ids, --prompt-ids), or put a tokenizer.json beside the weights.",
    )


def _are_ids(value: object) -> bool:
    """Whether a list is one prompt: its first entry says so, and the rest is checked with the prompt."""
    if hasattr(value, "tolist"):
        return True
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], int)


def checked_ids(given: object, vocab: int) -> TokenIds:
    rows = isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"
    ids = (
        given.tolist() if hasattr(given, "tolist") and not rows else given
    )  # tensors, and arrays of other kinds
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes | bytearray):
        raise RequestError(f"A prompt is a {type(given).__name__}.", _FORMS)
    if not len(ids):
        raise RequestError("The prompt is empty.", "It must have at least one token.")
    try:
        made = TokenIds.of(ids)
    except (TypeError, OverflowError):
        raise _mistake(getattr(ids, "tolist", lambda: ids)(), vocab) from None
    if made.array.view(np.uint32).max() >= vocab:  # a negative one is beyond every vocabulary
        raise _mistake(made, vocab)
    return made


def _mistake(ids: Iterable[object], vocab: int) -> RequestError:
    """The first id that the model does not have. This loop is slow, and runs only where there is one."""
    for position, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            return RequestError(f"Token {position} of the prompt is {token_id!r}.", "Token ids are integers.")
        if not 0 <= token_id < vocab:
            return RequestError(
                f"Token {position} of the prompt is {token_id}, but the vocabulary has {vocab} tokens.",
                f"Token ids go from 0 to {vocab - 1}.",
            )
    raise AssertionError("all ids are right")
