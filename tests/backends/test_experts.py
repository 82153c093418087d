"""Routers and experts in the reference: ties, weights, and the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import PROMPT, reference
from monotape.backends.reference.experts import choose, gated, weighted_sum
from monotape.models.experts import Experts, Gating, Softmax

Checkpoints = Callable[[str], Path]


def test_ties_go_to_the_lower_expert() -> None:
    logits = np.array([[1, 3, 3, 3, 0], [2, 2, 2, 2, 2], [0, 5, 1, 5, 1]], np.float32)
    choice = choose(logits, Experts(5, 2))
    assert choice.experts.tolist() == [[1, 2], [0, 1], [1, 3]]
    assert np.allclose(choice.weights, 0.5)


def test_weights_are_a_softmax_over_the_chosen_or_over_all() -> None:
    logits = np.array([[0.5, -1.0, 2.0, 1.5]], np.float32)
    every = np.exp(logits[0].astype(np.float64)) / np.exp(logits[0].astype(np.float64)).sum()
    chosen = choose(logits, Experts(4, 2, Softmax.CHOSEN))
    assert chosen.experts.tolist() == [[2, 3]]
    assert np.allclose(chosen.weights[0], every[2:] / every[2:].sum(), rtol=1e-6)
    assert np.allclose(choose(logits, Experts(4, 2, Softmax.ALL)).weights[0], every[2:], rtol=1e-6)


def test_the_gate_of_gpt_oss_is_clamped() -> None:
    gating = Gating(1.702, 7.0, 1.0)
    gate, up = np.array([9, -9, 1], np.float32), np.array([-9, 9, 0.5], np.float32)
    limited = np.array([7, -9, 1]), np.array([-7, 7, 0.5])
    want = limited[0] / (1 + np.exp(-1.702 * limited[0])) * (limited[1] + 1)
    assert np.allclose(gated(gate, up, gating), want, rtol=1e-6)


def test_outputs_are_added_in_the_order_of_the_expert_index() -> None:
    """Three addends whose float32 sum depends on the order."""
    down = np.array([[[1e8]], [[-1e8]], [[1.0]]], np.float32)
    logits = np.array([[0.0, 0.0, 0.0]], np.float32)
    choice = choose(logits, Experts(3, 3))
    one = np.ones(1, np.float32)
    third = np.float32(1) / np.float32(3)
    want = (third * np.float32(1e8) + third * np.float32(-1e8)) + third
    assert weighted_sum([[one, one, one]], choice, {"down": down})[0, 0] == want != 0


def test_a_router_that_ties_everywhere_takes_the_first_experts(checkpoint: Checkpoints) -> None:
    """Equal rows of a router, in every layer: the same as a model of those experts alone."""
    backend = reference(checkpoint("mixtral"))
    tied = reference(checkpoint("mixtral"))
    for layer in tied._model._shards[0].layers:  # type: ignore[union-attr]
        layer["router"][:] = layer["router"][0]  # type: ignore[index]
    got = tied.logits(PROMPT[:9], tied.new_sequence())
    for layer in tied._model._shards[0].layers:  # type: ignore[union-attr]
        layer["gate"][2:] = np.nan  # type: ignore[index]  # never read
    assert np.array_equal(tied.logits(PROMPT[:9], tied.new_sequence()), got)
    assert not np.array_equal(backend.logits(PROMPT[:9], backend.new_sequence()), got)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_ranks_share_the_columns_of_experts(checkpoint: Checkpoints, name: str) -> None:
    alone, shared = reference(checkpoint(name)), reference(checkpoint(name), tp=2)
    want = alone.logits(PROMPT[:30], alone.new_sequence())
    got = shared.logits(PROMPT[:30], shared.new_sequence())
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
