"""What drafts were worth decides which of two kernels the next request takes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from monotape.backends.cuda.worth import Worth, passes_with_lookup
from monotape.backends.protocol import Token
from monotape.backends.token_ids import TokenIds

ALONE_NS, DRAFTING_NS = 1000, 1500
ROWS = 4


def answer(count: int, ns: int, ids: list[int] | None = None) -> list[Token]:
    return [Token(ids[i] if ids else i, i * ns) for i in range(count)]


def test_the_first_request_finds_out() -> None:
    assert Worth().pays


def test_accepted_drafts_are_worth_their_passes() -> None:
    worth = Worth()
    worth.learn(answer(101, DRAFTING_NS // 2), 50)  # 50 passes for 100 tokens
    assert worth.pays


def test_drafts_that_nothing_follows_are_not() -> None:
    worth = Worth()
    worth.learn(answer(101, DRAFTING_NS), 2)
    assert not worth.pays


def test_a_pass_costs_what_was_measured() -> None:
    worth = Worth()
    worth.learn_alone((), answer(101, ALONE_NS), ROWS)
    worth.learn(answer(101, DRAFTING_NS), 40)  # 60 passes, 2,500 ns each
    assert worth.cost == pytest.approx(2.5)
    assert not worth.pays  # 1.7 tokens a pass at first, fewer with the request before


def test_a_text_that_repeats_its_prompt_turns_drafts_on_again() -> None:
    worth, prompt = Worth(), list(range(1000, 1200))
    for _ in range(3):
        worth.learn(answer(101, DRAFTING_NS), 0)
    assert not worth.pays
    for _ in range(3):
        worth.learn_alone(prompt, answer(200, ALONE_NS, prompt), ROWS)
    assert worth.pays


def test_a_short_answer_decides_nothing_but_many_do() -> None:
    worth = Worth()
    worth.learn(answer(8, DRAFTING_NS), 0)
    worth.learn_alone((), answer(8, ALONE_NS), ROWS)
    assert worth.pays
    for _ in range(2):
        worth.learn(answer(8, DRAFTING_NS), 0)
    assert not worth.pays


def test_a_short_answer_changes_less_than_a_long_one() -> None:
    times = []
    for count in (3, 200):
        worth = Worth()
        worth.learn(answer(101, DRAFTING_NS), 0)
        worth.learn(answer(count, 3 * DRAFTING_NS), 0)
        times.append(worth.drafting_ns)
    assert times == [pytest.approx(1.166 * DRAFTING_NS, rel=1e-3), pytest.approx(2 * DRAFTING_NS)]


def test_one_token_says_nothing() -> None:
    worth = Worth()
    worth.learn(answer(1, DRAFTING_NS), 0)
    worth.learn_alone((), answer(1, ALONE_NS), ROWS)
    assert worth == Worth()


@pytest.mark.parametrize("prompt", [0, 30_000])
def test_an_answer_longer_than_what_is_searched_counts_only_that(prompt: int) -> None:
    worth, ids = Worth(), np.random.default_rng(5).permutation(40_000).tolist()
    worth.learn_alone(TokenIds.of(range(prompt)), answer(40_000, ALONE_NS, ids), ROWS)
    assert worth.tokens == worth.passes and not worth.pays
    assert worth.alone_ns == ALONE_NS


def one_by_one(text: list[int], count: int, rows: int) -> int:
    """The same count, written out: the newest earlier place of a pair is looked up for each token."""
    follows: dict[tuple[int, int], int] = {}
    found = [False, False]
    for at, (pair, token) in enumerate(zip(pairwise(text), text[2:], strict=False), 2):
        assert at == len(found)
        found.append(follows.get(pair) == token)
        follows[pair] = token
    passes, at = 0, len(text) - count
    while at < len(text):
        passes += 1
        drafts = 0
        while drafts < rows - 1 and at < len(text) and found[at]:
            drafts, at = drafts + 1, at + 1
        at += 1
    return passes


@pytest.mark.parametrize("seed", range(20))
def test_passes_are_those_of_a_plain_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    text = random.integers(0, int(random.integers(2, 9)), int(random.integers(3, 300))).tolist()
    count, rows = int(random.integers(1, len(text) + 1)), int(random.integers(2, 5))
    assert passes_with_lookup(np.asarray(text, np.int64), count, rows) == one_by_one(text, count, rows)


def test_a_copy_takes_a_pass_for_as_many_tokens_as_it_has_rows() -> None:
    text = np.arange(400, dtype=np.int64) % 200
    assert passes_with_lookup(text, 196, ROWS) == 49


def test_a_text_without_repetition_takes_a_pass_a_token() -> None:
    assert passes_with_lookup(np.arange(400, dtype=np.int64), 200, ROWS) == 200
