"""From a request's fields to SamplingParams, made once: they travel to the engine as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monotape.engine.sampling_params import SEED_BITS, SamplingParams
from monotape.errors import RequestError
from monotape.server.api_error import bad_request, from_engine_error
from monotape.server.requests.openai import Sampled

MAX_COMPLETIONS = 16
_ANY_SEED = -1  # by which clients of llama.cpp and vLLM ask for another answer each time
_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip
_FIELDS = frozenset({*_PASSED_ON, "seed", "max_tokens", "logprobs", "prompt_logprobs"})


def sampling_params(request: Sampled, defaults: Mapping[str, Any], **decided: Any) -> SamplingParams:
    """How the tokens of one completion are chosen; the model's own recommendations where the request is silent."""
    given = {name: value for name in _PASSED_ON if (value := getattr(request, name)) is not None}
    if request.seed is not None and request.seed != _ANY_SEED:
        given["seed"] = request.seed % 2**SEED_BITS  # clients draw signed ones
    try:
        return SamplingParams(**{**defaults, **given, **decided})
    except RequestError as error:
        raise from_engine_error(error, _FIELDS) from None


def completions_of(request: Sampled) -> int:
    """How many answers each prompt gets; the engine makes them one after another, from the same params."""
    count = request.n or 1
    if count > MAX_COMPLETIONS:
        raise bad_request(f"n is {count}. It must be from 1 to {MAX_COMPLETIONS}.", "n", "invalid_value")
    return count
