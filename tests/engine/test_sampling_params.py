"""Sampling parameters: every number checked, by name and with its range."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monotape.backends.protocol import Sampling
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import RequestError, UsageError

NUMBERS = [
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p",
]  # fmt: skip
INTEGERS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
FLAGS = ["ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"]


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.stop_strings, params.stop_token_ids, params.logit_bias) == ((), (), None)


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", 1e300, -1e300, 10**30, -5])
def test_no_number_may_be_senseless(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is .*It must be .* from ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.hint


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_integers(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: 1.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-9), ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("min_p", 1.5), ("n", 0),
        ("max_tokens", 0), ("logprobs", 21), ("repetition_penalty", 0), ("presence_penalty", 2.5),
        ("frequency_penalty", -2.01), ("seed", 2**64), ("min_tokens", 17),
    ],
)  # fmt: skip
def test_each_range_ends_where_it_says(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", 1e-6), ("top_p", 1), ("top_k", -1), ("seed", 2**64 - 1),
        ("min_p", 1), ("max_tokens", None), ("logprobs", 0), ("repetition_penalty", 100),
        ("presence_penalty", -2), ("min_tokens", 16),
    ],
)  # fmt: skip
def test_each_range_includes_its_ends(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_flags(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is 1.*true or false"):
        SamplingParams(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ""}, {"stop": ["a", ""]}, {"stop": [1]}, {"stop": 3}, {"stop": ["x"] * 65},
        {"stop": "x" * 1025}, {"stop_token_ids": "12"}, {"stop_token_ids": [-1]}, {"stop_token_ids": [True]},
        {"logit_bias": [1]}, {"logit_bias": {"x": 1}}, {"logit_bias": {3: 101}},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {3: math.nan}}, {"logit_bias": {-3: 1.0}},
        {"logit_bias": dict.fromkeys(range(1025), 0.0)},
    ],
)  # fmt: skip
def test_lists_are_checked_entry_by_entry(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))) as caught:
        SamplingParams(**fields)
    assert len(str(caught.value)) < 300, "a long value is not repeated in full"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(RequestError, match=r"n is 2.*greedy"):
        SamplingParams(n=2, temperature=0)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no argument 'temprature'.*mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_params_are_values() -> None:
    params = SamplingParams(stop=["a", "b"], logit_bias={"7": 1}, stop_token_ids=[3])  # type: ignore[dict-item]
    assert params.stop == ("a", "b")
    assert params.logit_bias == {7: 1.0}
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert twin == params
        assert hash(twin) == hash(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    with pytest.raises(RequestError, match="top_p"):
        dataclasses.replace(params, top_p=3.0)


def test_what_the_backend_gets() -> None:
    params = SamplingParams(temperature=1, top_k=-1, top_p=0.5, min_p=0.1, logit_bias={3: 2, 1: -1}, seed=4)
    assert params.sampling(seed=9, vocab=11) == Sampling(
        temperature=1.0, top_k=0, top_p=0.5, min_p=0.1, logit_bias=((3, 2.0), (1, -1.0)), seed=9
    )
    assert SamplingParams(top_k=11).sampling(seed=0, vocab=11).top_k == 0
    assert SamplingParams(top_k=10).sampling(seed=0, vocab=11).top_k == 10


@pytest.mark.parametrize("fields", [{"logit_bias": {11: 1.0}}, {"stop_token_ids": [11]}])
def test_ids_beyond_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"Token id 11 .* has 11 tokens"):
        SamplingParams(**fields).sampling(seed=0, vocab=11)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(
    st.dictionaries(
        st.sampled_from([*NUMBERS, *INTEGERS]), st.floats() | st.integers() | st.none() | st.text()
    )
)
def test_any_value_is_taken_or_refused_with_its_name(fields: dict[str, Any]) -> None:
    try:
        message = f"n is {SamplingParams(**fields).n}"
    except RequestError as error:
        message = error.message
    assert any(message.startswith(f"{name} is ") for name in (*fields, "min_tokens", "n"))
