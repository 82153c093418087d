"""Is a stored head the embedding? Only a copy that is equal in every value may be left unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from monotape.models.fields import NOTES
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.formats import is_readable

HEAD = "lm_head.weight"
#: What the families call the matrix that a tied head shares.
EMBEDDINGS = ("model.embed_tokens.weight", "model.tok_embeddings.weight")
_CHUNK_VALUES = 1 << 22  # values compared at a time: bounds the memory


def embedding_copy(checkpoint: Checkpoint) -> str | None:
    """The embedding whose values the stored head repeats; None where the head is a matrix of its own."""
    if HEAD not in checkpoint.names:
        return None
    for name in EMBEDDINGS:
        if name in checkpoint.names and _equal(checkpoint, name, HEAD):
            return name
    return None


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model that says its head is the embedding, and stores another one: the stored one counts.

    transformers does the same.
    """
    note = f"config.json ties the head to the embedding, but {HEAD} holds other values; it is used as stored."
    told = config.get(NOTES)
    notes = told if isinstance(told, list) else []
    return {**config, "tie_word_embeddings": False, NOTES: [*notes, note]}


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    shape = checkpoint.shape(one)
    stored = {checkpoint.stored_as(one), checkpoint.stored_as(other)}
    if checkpoint.shape(other) != shape or len(shape) != 2 or not all(map(is_readable, stored)):
        return False  # the check of all tensors says what is wrong
    step = max(1, _CHUNK_VALUES // max(1, shape[1]))
    ranges = ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))
    try:
        return all(_equal_rows(checkpoint, one, other, start, stop) for start, stop in ranges)
    finally:
        checkpoint.release(one)
        checkpoint.release(other)


def _equal_rows(checkpoint: Checkpoint, one: str, other: str, start: int, stop: int) -> bool:
    """NaN equals nothing: a matrix that holds one is kept, and packing it names the row."""
    if checkpoint.stored_as(one) == checkpoint.stored_as(other):
        left, right = (checkpoint.half_rows(name, start, stop) for name in (one, other))
        if left is not None and right is not None and np.array_equal(left, right):
            return True  # the same words; others may still be the same numbers, as 0 and -0
    with np.errstate(invalid="ignore"):
        return np.array_equal(checkpoint.rows(one, start, stop), checkpoint.rows(other, start, stop))
