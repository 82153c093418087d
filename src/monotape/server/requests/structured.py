"""Structured output, in all the ways in which clients ask for it, as one grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from monotape.errors import RequestError
from monotape.server.api_error import bad_request, unsupported
from monotape.server.grammar import definition
from monotape.server.grammar.definition import Grammar
from monotape.server.requests.openai import Sampled

#: Fields that are a grammar by themselves: llama.cpp's and those of older versions of vLLM.
_GRAMMAR_FIELDS = {
    "grammar": "lark", "json_schema": "json", "guided_json": "json", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "lark",
}  # fmt: skip
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
_UNSERVED_CONSTRAINTS = {
    "disable_additional_properties": "write additionalProperties into the schema.",
    "whitespace_pattern": "JSON is written with one space after commas and colons.",
    "structural_tag": "use tools, or a grammar.",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Structured output and the field that asks for it."""

    param: str
    grammar: Grammar


def grammar_of(request: Sampled) -> Asked | None:
    """The grammar that a request asks for in any of the ways that clients know; at most one of them."""
    asked = [*_from_format(request), *_from_structured(request), *_from_fields(request)]
    if len(asked) > 1:
        names = ", ".join(param for param, _, _ in asked)
        raise bad_request(
            f"The request asks for structured output in more than one way: {names}.",
            asked[0][0],
            "invalid_value",
        )
    return _made(*asked[0]) if asked else None


def _made(param: str, kind: str, value: Any) -> Asked:
    try:
        if kind == "json":
            schema = json.loads(value) if isinstance(value, str) else value
            if not isinstance(schema, Mapping | bool):
                raise RequestError(f"{param} is not a JSON schema.", "It must be an object.")
            return Asked(param, definition.from_json_schema(schema))
        return Asked(param, getattr(definition, f"from_{kind}")(value))
    except RequestError as error:
        raise bad_request(f"{error.message} {error.hint}", param, "invalid_value") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{param} is not JSON: {error}.", param, "invalid_value") from None


def _from_format(request: Sampled) -> Iterator[tuple[str, str, Any]]:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return
    inner = None if wanted.json_schema is None else wanted.json_schema.schema
    schema = wanted.schema if inner is None else inner
    if schema is None and wanted.type == "json_schema":
        raise bad_request(
            "response_format has the type 'json_schema' but no json_schema.schema.",
            "response_format",
            "invalid_value",
        )
    yield "response_format", "json", {"type": "object"} if schema is None else schema


def _from_structured(request: Sampled) -> Iterator[tuple[str, str, Any]]:
    wanted = request.structured_outputs
    if wanted is None:
        return
    fields = msgspec.structs.asdict(wanted)
    for name, why in _UNSERVED_CONSTRAINTS.items():
        if fields[name]:
            raise unsupported(f"structured_outputs.{name}", why)
    given = {name: fields[name] for name in _CONSTRAINTS if fields[name] not in (None, False)}
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs has {len(given)} constraints. It must have one of json, regex, choice, grammar "
            "and json_object.",
            "structured_outputs",
            "invalid_value",
        )
    name, value = next(iter(given.items()))
    if name == "json_object":
        yield "structured_outputs", "json", {"type": "object"}
    else:
        yield "structured_outputs", "lark" if name == "grammar" else name, value


def _from_fields(request: Sampled) -> Iterator[tuple[str, str, Any]]:
    for name, kind in _GRAMMAR_FIELDS.items():
        value = getattr(request, name)
        if value not in (None, ""):  # llama.cpp's clients send an empty grammar where they want none
            yield name, kind, value
