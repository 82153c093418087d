"""Default sampling and end-of-text tokens of a model: from its own files, its authors, or built in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from monotape.engine.recommended import BY_AUTHORS, FALLBACK
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
#: A file that sets one of these has thought about sampling, and nothing is added to what it says.
_TRUNCATING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """The parameters of a request that names none, and where they come from, in words for a user."""

    params: SamplingParams
    source: str


def default_sampling(generation_config: Mapping[str, Any], names: Iterable[str] = ()) -> DefaultSampling:
    """The one place that decides it, for the command line, the Python API and the server.

    `names` are what the model is called: by the user, by its path, by its own files.
    """
    chosen = {
        name: generation_config[field]
        for field, name in _RECOMMENDED.items()
        if generation_config.get(field) is not None
    }
    source = "from the model's files"
    if (
        generation_config.get("do_sample") is False
    ):  # the other fields then say nothing, and files still list them
        chosen["temperature"] = 0.0
    elif not any(name in chosen for name in _TRUNCATING):
        more, source = _unsaid(names)
        chosen |= more
    try:
        return DefaultSampling(SamplingParams(**chosen), source)
    except RequestError as error:
        raise CheckpointError(f"generation_config.json cannot be used: {error.message}", error.hint) from None


def _unsaid(names: Iterable[str]) -> tuple[dict[str, float], str]:
    called = " ".join(names).lower()
    for name, settings in BY_AUTHORS.items():
        if name.lower() in called:
            return dict(settings), f"recommended by {name}'s authors"
    return dict(FALLBACK), "Monotape's own, because the model names none"


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
    named = [] if tokenizer is None else [tokenizer.eos_id, *_harmony_ends(tokenizer)]
    ids = {*spec.eos_ids, *listed, *(token_id for token_id in named if token_id is not None)}
    return frozenset(token_id for token_id in ids if 0 <= token_id < spec.vocab)


def _harmony_ends(tokenizer: Tokenizer) -> list[int | None]:
    """gpt-oss ends a message with <|return|> or <|call|>; some checkpoints list only the first as an end of text."""
    if tokenizer.id_of("<|channel|>") is None:
        return []
    return [tokenizer.id_of("<|return|>"), tokenizer.id_of("<|call|>")]
