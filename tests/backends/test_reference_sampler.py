"""The sampler: each rule on its own, the exact distribution, and frequencies that match it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from monotape.backends.protocol import Sampling
from monotape.backends.reference.sampler import (
    adjust,
    choose,
    draw,
    gumbel,
    logprobs,
    reference_probabilities,
    survivors,
)

pytestmark = pytest.mark.slow

Floats = NDArray[np.float32]

VOCAB = 37
DRAWS = 40_000
LOGITS = (2.0 * np.random.default_rng(0).standard_normal(VOCAB)).astype(np.float32)
PROMPT, OUTPUT = [3, 3, 8, 30], [8, 5, 5, 5, 36]

FILTERS: dict[str, dict[str, Any]] = {
    "temperature alone": {},
    "low temperature": {"temperature": 0.35},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.08},
    "repetition penalty": {"repetition_penalty": 1.7},
    "presence penalty": {"presence_penalty": 1.2},
    "frequency penalty": {"frequency_penalty": 0.6},
    "logit bias": {"logit_bias": ((4, 3.0), (9, -2.5), (4, 0.5))},
    "all": {
        "temperature": 1.3,
        "top_k": 14,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((4, 1.0), (9, -1.0)),
    },
}


def drawn(sampling: Sampling, banned: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """What `choose` would choose at each of DRAWS positions."""
    scaled = adjust(LOGITS, PROMPT, OUTPUT, sampling, banned) / np.float32(sampling.temperature)
    return draw(scaled, survivors(scaled, sampling), sampling.seed, np.arange(DRAWS))


def chi_square(tokens: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """How likely draws from `probabilities` look at least this uneven. Rare ids are counted together."""
    counts, expected = np.bincount(tokens, minlength=VOCAB).astype(float), probabilities * len(tokens)
    assert (counts[expected == 0] == 0).all(), "an id was drawn that cannot be"
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return float(stats.chisquare(counts[kept], expected[kept]).pvalue)


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_match_the_reference_probabilities(name: str) -> None:
    sampling = Sampling(**{"temperature": 0.9, "seed": 0x1234_5678_9ABC, **FILTERS[name]})
    probabilities = reference_probabilities(LOGITS, PROMPT, OUTPUT, sampling)
    assert (probabilities > 0).sum() >= 4
    tokens = drawn(sampling)
    assert chi_square(tokens, probabilities) > 1e-3
    # The same draws must not fit a distribution that is a little off, or the test above proves nothing.
    warmer = dataclasses.replace(sampling, temperature=sampling.temperature * 1.08)
    assert chi_square(tokens, reference_probabilities(LOGITS, PROMPT, OUTPUT, warmer) + 1e-12) < 1e-6


@pytest.mark.parametrize("name", FILTERS)
def test_choose_draws_what_was_counted(name: str) -> None:
    sampling = Sampling(**{"temperature": 0.9, "seed": 99, **FILTERS[name]})
    tokens = drawn(sampling)
    for position in range(0, DRAWS, 1601):
        assert choose(LOGITS, PROMPT, OUTPUT, position, sampling) == tokens[position]


def test_seeds_draw_from_the_same_distribution() -> None:
    tokens = [choose(LOGITS, PROMPT, OUTPUT, 7, Sampling(temperature=0.9, seed=seed)) for seed in range(6000)]
    probabilities = reference_probabilities(LOGITS, PROMPT, OUTPUT, Sampling(temperature=0.9))
    assert chi_square(np.array(tokens), probabilities) > 1e-3


def test_neighbouring_positions_are_independent() -> None:
    tokens = drawn(Sampling(temperature=0.9, seed=5))
    common = [token for token, _ in Counter(tokens.tolist()).most_common(6)]
    labels = np.array([common.index(token) if token in common else 6 for token in tokens.tolist()])
    table = np.zeros((7, 7))
    np.add.at(table, (labels[:-1], labels[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_banned_ids_are_never_drawn() -> None:
    sampling, best = Sampling(temperature=0.9, seed=5), tuple(np.argsort(-LOGITS)[:2].tolist())
    tokens = drawn(sampling, best)
    probabilities = reference_probabilities(LOGITS, PROMPT, OUTPUT, sampling, best)
    assert probabilities[list(best)].sum() == 0
    assert chi_square(tokens, probabilities) > 1e-3


def test_adjustments_by_hand() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5, 4.0], np.float32)
    sampling = Sampling(
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.125,
        logit_bias=((1, 1.0), (3, -1.0)),
    )
    got = adjust(logits, [0, 1], [1, 3, 3], sampling, banned=[4])
    # 0: in the prompt. 1: biased, then both penalties. 3: biased below zero, said twice. 4: banned.
    assert got.tolist() == [1.0, -2.0 - 0.25 - 0.125, 1.0, -1.0 - 0.25 - 0.25, -math.inf]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5, 4.0], "the caller's logits are not touched"


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([1.0, 3.0, 3.0, 0.0], np.float32)
    assert choose(logits, [], [], 0, Sampling()) == 1
    assert choose(logits, [], [], 0, Sampling(), banned=[1]) == 2
    assert reference_probabilities(logits, [], [], Sampling()).tolist() == [0, 1, 0, 0]


def test_ties_at_the_edge_of_a_filter_go_to_the_lower_id() -> None:
    flat = np.zeros(5, np.float32)
    assert survivors(flat, Sampling(temperature=1.0, top_k=3)).tolist() == [0, 1, 2]
    assert survivors(flat, Sampling(temperature=1.0, top_p=0.5)).tolist() == [0, 1, 2]
    assert survivors(flat, Sampling(temperature=1.0, top_p=0.4)).tolist() == [0, 1]
    assert survivors(flat, Sampling(temperature=1.0, top_p=0.0)).tolist() == [0]
    assert survivors(flat, Sampling(temperature=1.0, min_p=1.0)).tolist() == [0, 1, 2, 3, 4]


def test_filters_work_on_what_the_one_before_left() -> None:
    scaled = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the two that top-k leaves, the first holds 4/7 of the probability.
    assert survivors(scaled, Sampling(temperature=1.0, top_k=2, top_p=0.57)).tolist() == [0]
    assert survivors(scaled, Sampling(temperature=1.0, top_k=2, top_p=0.58)).tolist() == [0, 1]
    assert survivors(scaled, Sampling(temperature=1.0, min_p=0.6, top_p=0.99)).tolist() == [0, 1]


def test_when_everything_is_banned_the_lowest_id_remains() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, min_p=0.1)
    everything = list(range(VOCAB))
    assert choose(LOGITS, [], [], 0, sampling, everything) == 0
    assert reference_probabilities(LOGITS, [], [], sampling, everything)[0] == 1.0


def test_noise_is_a_function_of_seed_position_and_id() -> None:
    whole = gumbel(3, np.array([9]), np.arange(VOCAB))
    assert whole.dtype == np.float32
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(gumbel(3, np.array([9]), np.array([4, 11])), whole[[4, 11]])
    assert (gumbel(3, np.array([10]), np.arange(VOCAB)) != whole).any()


def test_noise_stays_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = np.array([0, 0xFFFFFFFF], np.uint32)
    monkeypatch.setattr("monotape.backends.reference.sampler.token_words", lambda *_: ends)
    high, low = gumbel(0, np.array([0]), np.array([0, 1])).tolist()
    assert high == pytest.approx(33 * math.log(2), rel=1e-6)
    assert low == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_log_probabilities() -> None:
    own, best = logprobs(LOGITS, 17, 5)
    want = special.log_softmax(LOGITS.astype(np.float64))
    assert own == pytest.approx(want[17], rel=1e-6)
    order = np.argsort(-LOGITS, kind="stable")[:5]
    assert [token for token, _ in best] == order.tolist()
    assert [value for _, value in best] == pytest.approx(want[order].tolist(), rel=1e-6)
    assert logprobs(LOGITS, 17, 0) == (own, ())
    assert [token for token, _ in logprobs(np.zeros(4, np.float32), 0, 3)[1]] == [0, 1, 2]


def test_log_probabilities_of_large_logits_do_not_overflow() -> None:
    own, _ = logprobs(np.array([3e4, 3e4, -3e4], np.float32), 0, 1)
    assert own == pytest.approx(-math.log(2))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=3).map(tuple),
    seed=st.integers(0, 2**64 - 1),
)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=9)
ROWS = st.lists(st.floats(-50, 50, width=32), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: np.array(values, np.float32)
)


@settings(max_examples=150, deadline=None)
@given(logits=ROWS, prompt=IDS, output=IDS, sampling=SAMPLINGS, banned=IDS, position=st.integers(0, 2**20))
def test_what_is_chosen_is_possible(
    logits: Floats,
    prompt: list[int],
    output: list[int],
    sampling: Sampling,
    banned: list[int],
    position: int,
) -> None:
    probabilities = reference_probabilities(logits, prompt, output, sampling, banned)
    assert probabilities.sum() == pytest.approx(1)
    token = choose(logits, prompt, output, position, sampling, banned)
    assert probabilities[token] > 0
    assert token not in banned
    assert token == choose(logits, prompt, output, position, sampling, banned)
    if sampling.top_k and not sampling.greedy:
        assert (probabilities > 0).sum() <= sampling.top_k


@settings(max_examples=150, deadline=None)
@given(logits=ROWS, sampling=SAMPLINGS.filter(lambda sampling: not sampling.greedy))
def test_survivors_are_the_best(logits: Floats, sampling: Sampling) -> None:
    kept = survivors(logits, sampling)
    assert len(kept) >= 1
    assert (np.diff(kept) > 0).all()
    order = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
    assert sorted(kept.tolist()) == sorted(order[: len(kept)])
