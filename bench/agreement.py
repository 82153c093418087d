"""How much of a model is left in another format: its log-probabilities on a fixed text beside those in float32.

The text is bench/texts/agreement.txt, half prose and half Python, written for this purpose. All of it is one prompt,
and every token but the first is scored. The reference is the same file with its values unpacked to float32, which holds
them exactly. So the figures say what reading or rounding the weights costs here. What the file's authors lost when they
quantised the model is not in them: that needs their 16-bit checkpoint.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import Backend
from monotape.engine.tokenizer import Tokenizer
from monotape.weights.checkpoint import Checkpoint

TEXT = Path(__file__).parent / "texts" / "agreement.txt"
_ROWS = 64  # of logits at a time: a vocabulary of 150,000 has 40 MB of them


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of each token after the first: log-probabilities of the whole vocabulary."""

    ids: tuple[int, ...]
    logs: NDArray[np.float32]  # a row a token, a column an id

    @property
    def perplexity(self) -> float:
        chosen = self.logs[np.arange(len(self.logs)), self.ids[1:]]
        return float(np.exp(-chosen.mean(dtype=np.float64)))


def text_facts() -> dict[str, Any]:
    """What a report says of the text."""
    return {"text": f"bench/texts/{TEXT.name}", "text_sha256": hashlib.sha256(TEXT.read_bytes()).hexdigest()}


def text_ids(checkpoint: Checkpoint, limit: int | None = None) -> tuple[int, ...]:
    """The text, or its first `limit` tokens, as the checkpoint's own tokenizer writes it."""
    tokenizer = Tokenizer.from_assets(checkpoint.text)
    assert tokenizer is not None, f"{checkpoint.source} has no tokenizer"
    return tuple(tokenizer.encode(TEXT.read_text("utf-8")))[:limit]


def scores_of(backend: Backend, ids: tuple[int, ...]) -> Scores:
    """One pass over the ids, a piece at a time."""
    sequence = backend.new_sequence()
    logs = np.empty((len(ids) - 1, backend.spec.vocab), np.float32)
    for start in range(0, len(logs), _ROWS):
        piece = logs[start : start + _ROWS]
        piece[:] = log_softmax(backend.logits(ids[start : start + len(piece)], sequence))
    return Scores(ids, logs)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def agreement(found: Scores, reference: Scores) -> dict[str, float]:
    """How often both models find the same token most likely, and how far apart their distributions are."""
    assert found.ids == reference.ids
    same = found.logs.argmax(axis=1) == reference.logs.argmax(axis=1)
    return {
        "perplexity": found.perplexity,
        "perplexity_over_reference": found.perplexity / reference.perplexity,
        "same_token_share": float(same.mean()),
        "divergence_nats": _divergence(reference.logs, found.logs),
    }


def _divergence(reference: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """The Kullback-Leibler divergence of `found` from `reference`, its mean over all tokens."""
    sums = [
        float((np.exp(row.astype(np.float64)) * (row.astype(np.float64) - other)).sum())
        for row, other in zip(reference, found, strict=True)
    ]
    return float(np.mean(sums))
