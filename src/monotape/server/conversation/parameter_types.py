"""Which JSON types the schema of a tool lets a parameter have, for calls whose values are written without quotes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = {"True": True, "False": False, "None": None}
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),), "string": (str,),
}  # fmt: skip
_TOGETHER = ("anyOf", "oneOf", "allOf")
#: Keywords of schemas that name no type, though they speak of one.
_IMPLIED = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}


def types_of(schema: Any, key: str) -> frozenset[str]:
    """The JSON types that a parameter may have; none where the schema does not say, or makes no sense."""
    found: set[str] = set()
    for parameters in _parts(schema, schema):
        properties = parameters.get("properties")
        if isinstance(properties, Mapping):
            for part in _parts(properties.get(key), schema):
                found |= _own_types(part)
    return frozenset(found)


def as_json(text: str, types: frozenset[str]) -> str:
    """The value as JSON of one of these types, or as text if it has none of them."""
    stripped = text.strip()
    try:
        value = _WORDS[stripped] if stripped in _WORDS else json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # no JSON, or deeper than the stack
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return str(int(value))  # 5.0 is an integer in JSON's schemas, but not to every client
    fits = any(type(value) in _TYPES.get(name, ()) for name in types - {"string"})
    if not fits:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if stripped in _WORDS else stripped


def _parts(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those that it is made of: what it refers to in `root`, and its alternatives. Each comes once."""
    waiting, seen = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting.append(_referred(part.get("$ref"), root))
        for name in _TOGETHER:
            variants = part.get(name)
            waiting += variants if isinstance(variants, list) else []


def _referred(reference: Any, root: Any) -> Any:
    """The part of a schema that `#/$defs/Name` points at; None where nothing is there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that one schema names by itself."""
    given = schema.get("type")
    if found := {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}:
        return found
    values = schema.get("enum")
    values = list(values) if isinstance(values, list) else []
    values += [schema["const"]] if "const" in schema else []
    if values:
        return {name for name, kinds in _TYPES.items() if any(type(value) in kinds for value in values)}
    return {name for keyword, name in _IMPLIED.items() if keyword in schema}


def _no_constant(_: str) -> None:
    raise ValueError("NaN and Infinity are no JSON")
