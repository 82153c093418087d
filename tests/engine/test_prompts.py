"""Prompts in all their forms, and those that cannot be served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.scripted_model import GREEDY, VOCAB, make
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import RequestError


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("hello", 1),
        (["hello", "he"], 2),
        ({"prompt": "hello"}, 1),
        ({"prompt_token_ids": [1, 2]}, 1),
        ([{"prompt": "hello"}, {"prompt_token_ids": [1, 2], "prompt": "shown"}, "x", [3, 4]], 4),
        ([1, 2, 3], 1),
        ((1, 2, 3), 1),
        (np.array([1, 2, 3]), 1),
        ([[1, 2], [3]], 2),
    ],
)
def test_prompts_come_in_many_forms(prompts: Any, count: int) -> None:
    llm, backend = make()
    outputs = llm.generate(prompts, GREEDY)
    assert len(outputs) == len(backend.jobs) == count
    assert [tuple(output.prompt_token_ids) for output in outputs] == [job.prompt for job in backend.jobs]
    assert len({output.request_id for output in outputs}) == count


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt is empty"),
        ([], "no prompt"),
        ([[]], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({}, "field"),
        ({"prompt": "x", "multi_modal_data": 1}, "'multi_modal_data'"),
        (7, "int"),
        ([1.5], "float"),
        ([[1, "x"]], "'x'"),
        ([[1, True]], "True"),
        ({"prompt_token_ids": "12"}, "str"),
        ([[1, VOCAB]], f"{VOCAB}, but the vocabulary has {VOCAB} tokens"),
        ([[-1]], "is -1"),
        (None, "NoneType"),
        ("\ud800", "surrogate"),
        (b"hello", "bytes"),
        ([b"hello"], "bytes"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompts: Any, message: str) -> None:
    llm, backend = make()
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.hint
    assert not backend.jobs


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 0])
def test_sampling_params_of_another_type_are_refused(params: Any) -> None:
    llm, backend = make()
    for start in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="no SamplingParams") as caught:
            start("hello", params)
        assert "SamplingParams(" in caught.value.hint
    assert not backend.jobs


def test_all_prompts_are_checked_before_the_first_one_runs() -> None:
    llm, backend = make()
    with pytest.raises(RequestError):
        llm.generate(["hello", "x" * 500], GREEDY)
    assert not backend.jobs


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    llm, backend = make(context=31)
    words = "length is 31 tokens. However, you requested {} output tokens and your prompt contains 20 input"
    with pytest.raises(RequestError, match=words.format(12)) as caught:
        llm.generate([[1] * 20], SamplingParams(max_tokens=12))
    assert "at most 11" in caught.value.hint
    with pytest.raises(
        RequestError, match=r"length is 31 tokens\. However, your prompt contains 31 input"
    ) as caught:
        llm.generate([[1] * 31], SamplingParams(max_tokens=None))
    assert "at most 30 tokens" in caught.value.hint
    with pytest.raises(RequestError, match=words.format("at least 12")):
        llm.generate([[1] * 20], SamplingParams(max_tokens=None, min_tokens=12))
    assert not backend.jobs
    llm.generate([[1] * 20], SamplingParams(max_tokens=None))
    llm.generate([[1] * 30], SamplingParams(max_tokens=1))
    assert [job.max_tokens for job in backend.jobs] == [11, 1]
