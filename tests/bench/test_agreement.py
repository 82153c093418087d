"""Agreement on the fixed text: equal models agree fully, and others by what the definitions say."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agreement import TEXT, Scores, agreement, log_softmax, scores_of, text_facts

#: A changed text makes reports incomparable: one that is changed needs another name.
TEXT_SHA256 = "cbe732fe0f030c6bc2d9630f60195e26fdf492b813d192c38917453dfe3a833a"


def scores(probabilities: list[list[float]], ids: tuple[int, ...]) -> Scores:
    return Scores(ids, np.log(np.array(probabilities, np.float32)))


def test_the_text_is_the_one_that_reports_name() -> None:
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == TEXT_SHA256 == text_facts()["text_sha256"]


def test_a_model_agrees_with_itself() -> None:
    one = scores([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], (0, 1, 2))
    found = agreement(one, one)
    assert found["same_token_share"] == found["perplexity_over_reference"] == 1
    assert found["divergence_nats"] == 0
    assert found["perplexity"] == pytest.approx((0.3 * 0.7) ** -0.5, rel=1e-6)


def test_figures_of_another_model() -> None:
    reference = scores([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], (0, 1, 2))
    other = scores([[0.25, 0.25, 0.5], [0.1, 0.2, 0.7]], (0, 1, 2))
    found = agreement(other, reference)
    assert found["same_token_share"] == 0.5
    assert found["perplexity"] == pytest.approx((0.25 * 0.7) ** -0.5, rel=1e-6)
    apart = 0.5 * np.log(0.5 / 0.25) + 0.3 * np.log(0.3 / 0.25) + 0.2 * np.log(0.2 / 0.5)
    assert found["divergence_nats"] == pytest.approx(apart / 2, rel=1e-5)


def test_large_logits_stay_finite() -> None:
    logs = log_softmax(np.array([[1e4, 0.0, -1e4], [3.0, 3.0, 3.0]], np.float32))
    assert np.isfinite(logs).all()
    assert np.exp(logs).sum(axis=1) == pytest.approx(1)


class Counting:
    """A backend whose logits name the position and the token that they follow."""

    spec = SimpleNamespace(vocab=7)

    def new_sequence(self) -> list[int]:
        return []

    def logits(self, tokens: tuple[int, ...], sequence: list[int]) -> NDArray[np.float32]:
        first = len(sequence)
        sequence.extend(tokens)
        return np.array(
            [np.arange(7) * (1 + (first + index) % 3) + token for index, token in enumerate(tokens)],
            np.float32,
        )


def test_every_token_but_the_first_is_scored_after_those_before_it() -> None:
    backend: Any = Counting()
    ids = tuple(index % 7 for index in range(131))  # three pieces, the last of them short
    found = scores_of(backend, ids)
    assert found.logs.shape == (130, 7)
    whole = backend.logits(ids[:-1], [])
    assert found.logs == pytest.approx(log_softmax(whole), rel=1e-6)
