"""Bits per byte of held-out packages, with what is needed to tell noise from difference."""

from __future__ import annotations

import math
from typing import Any

import torch

from monotape.training.data import Corpus
from monotape.training.laneformer import Laneformer
from monotape.training.streams import IGNORED, token_losses

GROUPS = 64  # of neighbouring sequences; their spread is that of the packages


@torch.no_grad()
def bits_per_byte(model: Laneformer, corpus: Corpus, micro_sequences: int) -> dict[str, Any]:
    """Bits per byte of all text, its standard error over the groups, and the groups themselves.

    Two runs are compared group by group: a group of texts that is hard for one model is hard for the other.
    """
    nats, text = [], []
    for start in range(0, len(corpus.validation), micro_sequences):
        rows = corpus.validation[start : start + micro_sequences].long() & 0xFFFF
        targets = corpus.targets(rows)
        counted = targets != IGNORED
        nats.append(token_losses(model, rows, targets).double().sum(1))
        text.append(torch.where(counted, corpus.token_bytes[targets.clamp(min=0)], 0.0).sum(1))
    all_nats, all_text = torch.cat(nats).cpu(), torch.cat(text).cpu()
    groups = [
        (float(one.sum()) / math.log(2), float(two.sum()))
        for one, two in zip(all_nats.tensor_split(GROUPS), all_text.tensor_split(GROUPS), strict=True)
        if len(one)
    ]
    bits, size = sum(one for one, _ in groups), sum(two for _, two in groups)
    return {
        "bits_per_byte": bits / size, "standard_error": standard_error(groups, bits / size), "bytes": int(size),
        "groups": [[round(one, 2), int(two)] for one, two in groups],
    }  # fmt: skip


def standard_error(groups: list[tuple[float, float]], ratio: float) -> float:
    """Of a ratio of sums over groups."""
    count, size = len(groups), sum(two for _, two in groups)
    if count < 2:
        return math.inf
    squares = sum((one - ratio * two) ** 2 for one, two in groups)
    return math.sqrt(squares * count / (count - 1)) / size


def difference(run: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """How many bits per byte `run` needs more than `base`, and the standard error of that, group by group."""
    pairs = [(one[0] - two[0], one[1]) for one, two in zip(run["groups"], base["groups"], strict=True)]
    size = sum(two for _, two in pairs)
    mean = sum(one for one, _ in pairs) / size
    return mean, standard_error(pairs, mean)
