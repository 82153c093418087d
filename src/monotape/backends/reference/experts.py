"""Experts in NumPy: a router's choice, the gate, and the sum of the chosen experts. models/experts.py defines them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.backends.reference.weights import Roles
from monotape.models.experts import SILU, Experts, Gating, Softmax

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The experts that each row passes, the lowest index first, and their weights: [row, chosen] each."""

    experts: NDArray[np.int64]
    weights: Floats


def choose(logits: Floats, experts: Experts) -> Choice:
    """The highest logits of each row. A stable sort keeps equal ones in their order, so the lower index wins."""
    best = np.argsort(-logits, axis=-1, kind="stable")[:, : experts.chosen]
    best.sort(axis=-1)
    chosen = np.take_along_axis(logits, best, axis=-1)
    peak: Floats = chosen.max(axis=-1, keepdims=True)
    weights: Floats = np.exp(chosen - peak)
    every = np.exp((chosen if experts.softmax is Softmax.CHOSEN else logits) - peak)
    total = np.asarray(every.sum(axis=-1, keepdims=True), np.float32)
    return Choice(best, weights / total)


def sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-x) may overflow to inf, and 1 / inf is the right 0
        value = np.float32(1) / (1 + np.exp(-x))
    return np.asarray(value, np.float32)


def silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        value: Floats = x / (1 + np.exp(-x))
    return value


def gated(gate: Floats, up: Floats, gating: Gating) -> Floats:
    if gating == SILU:
        return silu(gate) * up
    if gating.limit is not None:
        limit = np.float32(gating.limit)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(np.float32(gating.alpha) * gate) * (up + np.float32(gating.shift))


def product(x: Floats, tensors: Roles, role: str, expert: int) -> Floats:
    """A matrix of one expert times one row."""
    made: Floats = tensors[role][expert] @ x
    bias = f"{role}_bias"
    return made + tensors[bias][expert] if bias in tensors else made


def activations(x: Floats, choice: Choice, tensors: Roles, gating: Gating) -> list[list[Floats]]:
    """The outputs of each row's experts, in the order of the choice."""
    return [
        [gated(product(row, tensors, "gate", e), product(row, tensors, "up", e), gating) for e in experts]
        for row, experts in zip(x, choice.experts.tolist(), strict=True)
    ]


def weighted_sum(made: list[list[Floats]], choice: Choice, tensors: Roles) -> Floats:
    """The outputs of each row's experts, added up in the order of the expert index."""
    rows = []
    for row, experts, weights in zip(made, choice.experts.tolist(), choice.weights, strict=True):
        total: Floats | None = None
        for activation, expert, weight in zip(row, experts, weights, strict=True):
            output = weight * product(activation, tensors, "down", expert)
            total = output if total is None else total + output
        assert total is not None, "a token passes at least one expert"
        rows.append(total)
    return np.stack(rows)
