"""Ids as an array: equal to the lists they came from, and refused where they are no ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monotape.backends.token_ids import TokenIds, common_prefix
from monotape.engine.llm import LLM
from monotape.engine.prompts import make_prompt
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import RequestError
from share_source import ClockSource

ids_lists = st.lists(st.integers(0, 3), max_size=12)


@given(ids_lists, st.integers(-13, 13), st.integers(-13, 13))
def test_they_read_like_a_list(ids: list[int], start: int, end: int) -> None:
    made = TokenIds.of(ids)
    assert list(made) == ids and made == ids and made == tuple(ids) and len(made) == len(ids)
    assert list(made[start:end]) == ids[start:end]
    assert TokenIds.from_bytes(made.to_bytes()) == made
    assert TokenIds.joined(made, ids) == ids + ids


@given(ids_lists, ids_lists)
def test_the_common_prefix_is_that_of_the_lists(left: list[int], right: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert common_prefix(TokenIds.of(left), TokenIds.of(right)) == expected


def test_they_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        TokenIds.of([1, 2]).array[0] = 3


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([5, True, 6], "Token 1 of the prompt is True"),
        ([5, 1.0], "Token 1 of the prompt is 1.0"),
        ([5, "6"], "Token 1 of the prompt is '6'"),
        ([5, -1], "Token 1 of the prompt is -1"),
        ([7, 2**40], f"Token 1 of the prompt is {2**40}"),
        ([7, 10], "Token 1 of the prompt is 10, but the vocabulary has 10"),
        (np.array([3, 11], np.int64), "Token 1 of the prompt is 11"),
        (np.array([3, 2**40], np.int64), f"Token 1 of the prompt is {2**40}"),
        (np.array([3.0, 4.0]), "Token 0 of the prompt is 3.0"),
    ],
)
def test_the_first_wrong_id_is_named(wrong: object, text: str) -> None:
    with pytest.raises(RequestError) as raised:
        make_prompt({"prompt_token_ids": wrong}, None, 10)
    assert text in raised.value.message


def test_arrays_of_all_kinds_are_prompts() -> None:
    for given_ids in (np.array([1, 2]), np.array([1, 2], np.uint8), (1, 2), [1, np.int64(2)]):
        assert make_prompt({"prompt_token_ids": given_ids}, None, 10).ids == [1, 2]


def test_no_step_of_a_request_reads_its_prompt_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_parts(ClockSource(None, vocab=6000), context=6000)
    prompt = {"prompt_token_ids": list(range(5000))}
    greedy = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(prompt, greedy)
    read = 0

    def counted(self: TokenIds) -> Iterator[int]:
        nonlocal read
        read += len(self)
        return iter(self.array.tolist())

    monkeypatch.setattr(TokenIds, "__iter__", counted)
    output = llm.generate(prompt, greedy)[0]
    assert output.num_cached_tokens == 4999
    assert read < 50  # the last few may be looked at
    assert output.prompt_token_ids == prompt["prompt_token_ids"] and read >= 5000
