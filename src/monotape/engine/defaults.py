"""What a model's own files say about sampling and about the end of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monotape.engine.sampling_params import SamplingParams
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import CheckpointError, RequestError
from monotape.models.spec import ModelSpec

#: Fields of generation_config.json and the sampling parameter that each one is.
_RECOMMENDED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams with what the model's authors recommend in the place of vLLM's defaults."""
    chosen = {
        name: generation_config[field]
        for field, name in _RECOMMENDED.items()
        if generation_config.get(field) is not None
    }
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise CheckpointError(f"generation_config.json cannot be used: {error.message}", error.hint) from None


def end_of_text_ids(
    spec: ModelSpec, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Every token that ends an answer: those of config.json, generation_config.json and the tokenizer."""
    given = generation_config.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        raise CheckpointError(
            f"generation_config.json has {given!r} as eos_token_id.",
            "It must be a token id or a list of them.",
        )
    named = None if tokenizer is None else tokenizer.eos_id
    ids = {*spec.eos_ids, *listed, *([] if named is None else [named])}
    return frozenset(token_id for token_id in ids if 0 <= token_id < spec.vocab)
