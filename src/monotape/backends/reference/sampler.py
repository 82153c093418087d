"""The definition of sampling: from a model's logits to one token id, and the distribution that it draws from.

Every value is float32 and every operation is rounded on its own (no fused multiply-add), in this order:

1. logit bias is added;
2. repetition penalty r, once for each id in prompt or output: a positive logit is divided by r, any other
   multiplied;
3. presence penalty, then frequency penalty times the count, are subtracted for each id in the output;
4. banned ids become -inf;
5. temperature 0: the largest wins, the lowest id among equals. Else z = logit / temperature, and
6. min-p keeps z >= max(z) + log(min_p); of those top-k keeps the k best; of those top-p keeps, best first,
   the smallest prefix whose probability reaches top_p. Among equals the lower id is better;
7. Gumbel-max: of the survivors, the largest z + g wins, the lowest id among equals. g = -log(-log1p(-v)) with
   v from Philox(seed; token id, position). That draws from the survivors' softmax, and needs no sum.

Only the cumulative probabilities of top-p are float64. Logarithms are taken in float64 and rounded to
float32, which is what a correctly rounded float32 logarithm gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import Sampling
from monotape.backends.reference.philox import token_words

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def choose(
    logits: Floats,
    prompt: Sequence[int],
    output: Sequence[int],
    position: int,
    sampling: Sampling,
    banned: Sequence[int] = (),
) -> int:
    """The next token. `position` is its own: the number of tokens before it."""
    adjusted = adjust(logits, prompt, output, sampling, banned)
    if sampling.greedy:
        return int(np.argmax(adjusted))
    scaled = adjusted / np.float32(sampling.temperature)
    return int(draw(scaled, survivors(scaled, sampling), sampling.seed, np.array(position)))


def adjust(
    logits: Floats,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    banned: Sequence[int] = (),
) -> Floats:
    """Steps 1 to 4."""
    values = logits.astype(np.float32)
    for token, bias in sampling.logit_bias:
        values[token] += np.float32(bias)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt, *output], np.int64))
        penalty = np.float32(sampling.repetition_penalty)
        values[seen] = np.where(values[seen] > 0, values[seen] / penalty, values[seen] * penalty)
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        said, counts = np.unique(np.array(output, np.int64), return_counts=True)
        values[said] -= np.float32(sampling.presence_penalty)
        values[said] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    values[list(banned)] = -np.inf
    return values


def survivors(scaled: Floats, sampling: Sampling) -> Ids:
    """Step 6: the ids that can be drawn, in ascending order. There is always one."""
    best = scaled.max()
    if best == -np.inf:  # every id is banned: the greedy choice is all there is
        return np.zeros(1, np.int64)
    alive = scaled > -np.inf
    if sampling.min_p > 0:
        alive &= scaled >= best + np.float32(math.log(sampling.min_p))
    kept = np.flatnonzero(alive)
    if not sampling.top_k and sampling.top_p >= 1:
        return kept
    kept = kept[np.argsort(-scaled[kept], kind="stable")]
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1:
        cumulative = np.cumsum(np.exp(scaled[kept].astype(np.float64) - float(best)))
        reached = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1], side="left"))
        kept = kept[: reached + 1]
    return np.sort(kept)


def draw(scaled: Floats, kept: Ids, seed: int, positions: Ids) -> Ids:
    """Step 7: one of the survivors for each position (all of them see the same logits)."""
    noise = gumbel(seed, positions[..., None], kept)
    winners: Ids = kept[np.argmax(scaled[kept] + noise, axis=-1)]
    return winners


def gumbel(seed: int, positions: Ids, ids: Ids) -> Floats:
    """The noise of step 7. v is kept away from 0 and 1, where a logarithm would be infinite."""
    words = token_words(seed, positions, ids).astype(np.float64)
    uniform = np.minimum((words + 0.5) * 2.0**-32, 1.0 - 2.0**-24).astype(np.float32)
    exponential = (-np.log1p(-uniform.astype(np.float64))).astype(np.float32)
    return (-np.log(exponential.astype(np.float64))).astype(np.float32)


def reference_probabilities(
    logits: Floats,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    banned: Sequence[int] = (),
) -> NDArray[np.float64]:
    """The distribution that `choose` draws from, over the whole vocabulary."""
    adjusted = adjust(logits, prompt, output, sampling, banned)
    probabilities = np.zeros(len(adjusted), np.float64)
    if sampling.greedy:
        probabilities[np.argmax(adjusted)] = 1.0
        return probabilities
    scaled = adjusted / np.float32(sampling.temperature)
    kept = survivors(scaled, sampling)
    if len(kept) == 1:
        probabilities[kept] = 1.0
        return probabilities
    weights = np.exp(scaled[kept].astype(np.float64) - float(scaled[kept].max()))
    probabilities[kept] = weights / weights.sum()
    return probabilities


def logprobs(logits: Floats, chosen: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The model's own log-probability of `chosen`, and those of the `count` most likely ids, best first.

    The sum is float64 and the results are float32. Ids are ordered by logit, the lower id first among equals.
    """
    wide = logits.astype(np.float64)
    peak = wide.max()
    log_sum = peak + math.log(np.exp(wide - peak).sum())
    values = (wide - log_sum).astype(np.float32)
    order = np.argsort(-logits, kind="stable")[:count]
    return float(values[chosen]), tuple((int(token), float(values[token])) for token in order)
