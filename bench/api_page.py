"""Turns the server's OpenAPI document into a page of Markdown: every route, every field, every answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
FAR = 1_000_000
HEAD = """# The API

What the server takes and gives, generated from its OpenAPI document (`GET /openapi.json`) by `make api-docs`.
[Agents](agents/README.md) has the settings for clients, [deployment](deployment.md) the rest.

Fields that would change the answer and are not served are [refused by name](#fields-that-are-refused), with status 400;
so is a field of one route that is sent to another. [Some](#fields-that-are-ignored) change nothing about the answer and
are ignored, and so are undocumented names. Errors have the shape
`{"error": {"message", "type", "param", "code"}}`.
"""
HINTS = """\
Some fields that bodies have are hints. `reasoning_effort`, `reasoning.effort`, `output_config.effort` and `verbosity`
reach models whose chat templates know them. `thinking` switches thoughts on and off; its `budget_tokens` is no limit.
`strict` of a tool holds where a call is forced, with `tool_choice`; otherwise the model writes the arguments freely.
The model is told of the `format` of a custom tool, but not held to it.
`reasoning.summary` and `max_tool_calls` change nothing: thoughts are given whole, and this server runs no tools.
"""

GRAMMARS = """\
## Structured output

One of these in a request: `response_format` (OpenAI; llama.cpp's `schema` in it too), `structured_outputs` (vLLM, and
its older `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`), `grammar` and `json_schema` (llama.cpp),
`text.format` in responses, `output_config.format` in messages. A grammar is GBNF, with a rule `root`, or Lark, with a
rule `start`.

A schema, pattern or grammar has at most {characters} characters, a list at most {choices} choices. It is compiled in a
process of its own, which may take `--grammar-timeout` seconds of CPU time and {megabytes} MiB; for each token it then
has {token_ms:g} ms on average and {burst_ms:g} ms at once
([limits](../src/monotape/server/grammar/wire.py#GrammarLimits:token_s,burst_s)). A grammar that takes longer is refused
with status 400, one whose process was killed from outside with 503, and a client that leaves ends its grammar.
"""


def api_page() -> str:
    """The page for the server of this checkout."""
    from monotape.server.apis.openapi import document
    from monotape.server.apis.routes import ROUTES
    from monotape.server.engine import info

    shapes = (info.__doc__ or "").strip()
    said = f"## What answers say about themselves\n\n```text\n{shapes}\n```\n"
    return "\n".join([markdown(document(ROUTES)), _grammars(), *_fates(), said])


def _grammars() -> str:
    from monotape.server.grammar.definition import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS
    from monotape.server.grammar.wire import GrammarLimits

    limits = GrammarLimits()
    return GRAMMARS.format(
        characters=f"{MAX_GRAMMAR_CHARACTERS:,}", choices=f"{MAX_CHOICES:,}", megabytes=limits.max_bytes >> 20,
        token_ms=limits.token_s * 1e3, burst_ms=limits.burst_s * 1e3,
    )  # fmt: skip


def _fates() -> Iterator[str]:
    """What becomes of the fields that no body has."""
    from monotape.server.requests.fields import IGNORED, REFUSED

    yield "## Fields that are refused\n"
    yield "Unless their value asks for nothing: null, or what other servers take for off.\n"
    yield from ("| field | |", "| --- | --- |")
    yield from (f"| `{name}` | {_line(rule.why)} |" for name, rule in sorted(REFUSED.items()))
    yield "\n## Fields that are ignored\n"
    yield from ("| field | |", "| --- | --- |")
    yield from (f"| `{name}` | {_line(why)} |" for name, why in sorted(IGNORED.items()))
    yield f"\n{HINTS}"


def markdown(document: Schema) -> str:
    """The page for any OpenAPI document."""
    shared = _shared(document)
    parts = [HEAD, "\n".join(_index(document)) + "\n"]
    if shared:
        parts.append("\n".join(["Every route may also answer:", "", *_answers(shared, document)]) + "\n")
    for path, method, operation in _operations(document):
        own = {status: value for status, value in operation["responses"].items() if status not in shared}
        lines = [*_operation(path, method, operation, document), *_answers(own, document)]
        parts.append("\n".join(lines) + "\n")
    schemas = document.get("components", {}).get("schemas", {})
    if schemas:
        parts.append("## Objects\n")
        parts += ["\n".join(_object(name, schemas[name])) + "\n" for name in sorted(schemas)]
    return "\n".join(parts)


def _operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in ("get", "post", "put", "delete"):
                yield path, method.upper(), operation


def _index(document: Schema) -> Iterator[str]:
    yield "| route | |"
    yield "| --- | --- |"
    for path, method, operation in _operations(document):
        yield f"| [{method} {path}](#{_anchor(f'{method} {path}')}) | {_line(operation.get('summary', ''))} |"


def _operation(path: str, method: str, operation: Schema, document: Schema) -> Iterator[str]:
    yield f"## {method} {path}"
    yield ""
    for text in (operation.get("summary"), operation.get("description")):
        if text:
            yield from (_line(text), "")
    parameters = operation.get("parameters", ())
    if parameters:
        yield from ("| in the address | type | |", "| --- | --- | --- |")
        for parameter in parameters:
            described = _line(parameter.get("description", ""))
            yield f"| `{parameter['name']}` | {_type(parameter.get('schema', {}))} | {described} |"
        yield ""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield from _fields(_resolved(content["schema"], document))
        yield ""


def _shared(document: Schema) -> Schema:
    """Answers that every route may give in the same words: said once."""
    found = [operation["responses"] for _, _, operation in _operations(document)]
    if len(found) < 2:
        return {}
    return {status: value for status, value in found[0].items()
            if status != "200" and all(other.get(status) == value for other in found)}  # fmt: skip


def _answers(responses: Schema, document: Schema) -> Iterator[str]:
    yield from ("| status | body | |", "| --- | --- | --- |")
    for status, response in responses.items():
        described = _resolved(response, document)
        bodies = ", ".join(
            f"{kind}: {_type(content.get('schema', {}))}"
            for kind, content in described.get("content", {}).items()
        )
        yield f"| {status} | {bodies or 'none'} | {_line(described.get('description', ''))} |"


def _object(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if schema.get("description"):
        yield from (_line(schema["description"]), "")
    if "properties" in schema:
        yield from _fields(schema)
    else:
        yield _type(schema)


def _fields(schema: Schema) -> Iterator[str]:
    """A table of an object's fields; a body that is one of several objects has a line for each."""
    if "properties" not in schema:
        yield _type(schema)
        return
    required = set(schema.get("required", ()))
    yield from ("| field | type | |", "| --- | --- | --- |")
    for name, field in schema["properties"].items():
        notes = ["required"] if name in required else []
        if field.get("default") not in (None, ...):
            notes.append(f"default {_value(field['default'])}")
        if field.get("description"):
            notes.append(_line(field["description"]))
        yield f"| `{name}` | {_type(field)} | {'; '.join(notes)} |"


def _type(schema: Schema | bool) -> str:
    """A schema in a few words."""
    if isinstance(schema, bool) or not schema:
        return "any"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{_anchor(name)})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            options = [_type(option) for option in schema[key]]
            return " or ".join(dict.fromkeys(option for option in options if option != "null")) or "null"
    if "enum" in schema:
        return ", ".join(_value(value) for value in schema["enum"])
    if "const" in schema:
        return _value(schema["const"])
    return _plain(schema)


def _plain(schema: Schema) -> str:
    kind: str | list[str] = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(name for name in kind if name != "null")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}{_bounds(schema, 'minItems', 'maxItems')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    return kind + _bounds(schema, "minimum", "maximum") + _bounds(schema, "minLength", "maxLength")


def _bounds(schema: Schema, low: str, high: str) -> str:
    """Limits that a person can meet; those that only keep numbers inside a machine's are left out."""
    limits = {key: schema[key] for key in (low, high) if abs(schema.get(key, FAR)) < FAR}
    if len(limits) == 2:
        return f", {limits[low]} to {limits[high]}"
    if low in limits:
        return f", at least {limits[low]}"
    return f", at most {limits[high]}" if high in limits else ""


def _value(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _resolved(schema: Schema, document: Schema) -> Schema:
    """What a reference points at."""
    found: Any = schema
    while "$ref" in found:
        target: Any = document
        for part in found["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        found = target
    resolved: Schema = found
    return resolved


def _line(text: str) -> str:
    """Text for one line of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _anchor(title: str) -> str:
    """The anchor that a heading gets where Markdown is shown."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
