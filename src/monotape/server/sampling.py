"""From a request's fields to the arguments of SamplingParams and a grammar, everything checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from monotape.engine.sampling_params import SEED_BITS, SamplingParams
from monotape.errors import RequestError
from monotape.server import grammar, requests
from monotape.server.api_error import ApiError, bad_request, from_engine_error, unsupported

_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "n", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip
MAX_COMPLETIONS = 16
#: What one kind of request has and another refuses.
_SERVED: dict[type, tuple[str, ...]] = {requests.CompletionRequest: ("echo",)}
_FIELDS = frozenset({*_PASSED_ON, "seed", "max_tokens", "logprobs", "prompt_logprobs"})


def refuse_unsupported(request: msgspec.Struct) -> None:
    for name, (why, harmless) in requests.UNSUPPORTED.items():
        value = getattr(request, name, UNSET)
        if value is not UNSET and value not in harmless and name not in _SERVED.get(type(request), ()):
            raise unsupported(name, why)


def sampling_arguments(
    request: msgspec.Struct, defaults: Mapping[str, Any], **decided: Any
) -> dict[str, Any]:
    """The arguments, with the model's own recommendations where the request is silent."""
    given = {
        name: value for name in _PASSED_ON if (value := getattr(request, name, None)) is not None
    }  # fmt: skip
    if (seed := getattr(request, "seed", None)) is not None:
        given["seed"] = seed % 2**SEED_BITS  # clients draw signed ones
    arguments = {**defaults, **given, **decided}
    check(arguments)
    return arguments


def check(arguments: Mapping[str, Any]) -> SamplingParams:
    if arguments.get("n", 1) > MAX_COMPLETIONS:
        raise bad_request(
            f"n is {arguments['n']}. It must be from 1 to {MAX_COMPLETIONS}.", "n", "invalid_value"
        )
    if arguments.get("n", 1) > 1 and arguments.get("temperature") == 0:
        arguments = {**arguments, "n": 1}  # the same answer n times; wasteful, but what was asked for
    try:
        return SamplingParams(**arguments)
    except RequestError as error:
        raise from_engine_error(error, _FIELDS) from None


def grammar_of(request: Any) -> str | None:
    """The grammar that a request asks for in any of the ways that clients know; at most one of them."""
    asked = [
        found for found in (_from_format(request), _from_structured(request), _from_guided(request)) if found
    ]
    if len(asked) > 1:
        raise bad_request(
            "The request asks for structured output in more than one way.", "response_format", "invalid_value"
        )
    if not asked:
        return None
    param, kind, value = asked[0]
    return compile_grammar(kind, value, param)


def compile_grammar(kind: str, value: Any, param: str) -> str:
    try:
        if kind == "json":
            schema = json.loads(value) if isinstance(value, str) else value
            return grammar.from_json_schema(schema)
        made: str = getattr(grammar, f"from_{kind}")(value)
        return made
    except RequestError as error:
        raise bad_request(f"{error.message} {error.hint}", param, "invalid_value") from None
    except ValueError as error:
        raise bad_request(f"{param} is not JSON: {error}.", param, "invalid_value") from None


def _from_format(request: Any) -> tuple[str, str, Any] | None:
    wanted = getattr(request, "response_format", None)
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "response_format", "json", {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise _missing_schema()
    return "response_format", "json", wanted.json_schema.schema


def _missing_schema() -> ApiError:
    return bad_request(
        "response_format has the type 'json_schema' but no json_schema.schema.",
        "response_format",
        "invalid_value",
    )


def _from_structured(request: Any) -> tuple[str, str, Any] | None:
    wanted = getattr(request, "structured_outputs", None)
    if wanted is None:
        return None
    given = {
        name: value for name, value in msgspec.structs.asdict(wanted).items() if value not in (None, False)
    }
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs has {len(given)} constraints. It must have one of json, regex, choice, grammar "
            "and json_object.",
            "structured_outputs",
            "invalid_value",
        )
    name, value = next(iter(given.items()))
    if name == "json_object":
        return "structured_outputs", "json", {"type": "object"}
    return "structured_outputs", "lark" if name == "grammar" else name, value


def _from_guided(request: Any) -> tuple[str, str, Any] | None:
    for name, kind in (("json", "json"), ("regex", "regex"), ("choice", "choice"), ("grammar", "lark")):
        value = getattr(request, f"guided_{name}", None)
        if value is not None:
            return f"guided_{name}", kind, value
    return None
