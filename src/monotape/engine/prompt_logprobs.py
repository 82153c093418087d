"""How likely the model finds each token of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from monotape.backends.protocol import Backend, KvSequence, Token
from monotape.engine.outputs import Logprob, TokenLogprobs, token_logprobs

_ROWS = 64  # rows of logits in memory at a time


def score_prompt(
    backend: Backend,
    sequence: KvSequence,
    prompt: Sequence[int],
    top: int,
    text_of: Callable[[int], str] | None,
) -> list[TokenLogprobs | None]:
    """Log-probabilities of all prompt tokens but the first, which nothing precedes.

    Fills the empty sequence with the KV of all tokens but the last: that one is left for the job.
    """
    scores: list[TokenLogprobs | None] = [None]
    for start in range(0, len(prompt) - 1, _ROWS):
        given = prompt[start : min(start + _ROWS, len(prompt) - 1)]
        logits = backend.logits(given, sequence).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for offset, row in enumerate(rows):
            scores.append(_shown(row, prompt[start + offset + 1], top, text_of))
    return scores


def _shown(
    row: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    token_id: int,
    top: int,
    text_of: Callable[[int], str] | None,
) -> TokenLogprobs:
    best = np.argsort(-row, kind="stable")[:top]
    likely = tuple((int(index), float(row[index])) for index in best)
    shown = token_logprobs(Token(token_id, 0, float(row[token_id]), likely), text_of)
    rank = int((row > row[token_id]).sum()) + 1
    shown[token_id] = Logprob(shown[token_id].logprob, rank, shown[token_id].decoded_token)
    return shown
