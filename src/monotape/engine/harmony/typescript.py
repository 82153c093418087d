"""Tools as the TypeScript types in which gpt-oss was taught them, spaces and line breaks included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def namespace(tools: Sequence[Mapping[str, Any]]) -> str:
    """The functions of a request; each is {"name", "description", "parameters"}."""
    lines = ["## functions", "", "namespace functions {", ""]
    for tool in tools:
        lines += [f"// {line}" for line in (tool.get("description") or "").splitlines()]
        parameters = tool.get("parameters")
        taken = "" if parameters is None else f"_: {type_of(parameters, '')}"
        lines += [f"type {tool['name']} = ({taken}) => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


def type_of(schema: Any, indent: str) -> str:
    """A JSON schema as a TypeScript type; `any` where TypeScript has no counterpart."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        written = (f"\n{indent} | {_variant(variant, indent)}" for variant in variants)
        return "".join(written)
    kind = schema.get("type")
    if isinstance(kind, list):
        names = ["number" if name == "integer" else name for name in kind if isinstance(name, str)]
        return " | ".join(names) if names else "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{type_of(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string" and (choices := _choices(schema)):
        return " | ".join(f'"{choice}"' for choice in choices if isinstance(choice, str))
    return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    description = schema.get("description")
    text = f"{indent}// {description}\n{{\n" if isinstance(description, str) else "{\n"
    fields, required = schema.get("properties"), schema.get("required")
    needed = required if isinstance(required, list) else []
    for name, field in fields.items() if isinstance(fields, Mapping) else ():
        text += _property(f"{name}{'' if name in needed else '?'}", field, indent)
    return f"{text}{indent}}}"


def _property(name: str, field: Any, indent: str) -> str:
    known = field if isinstance(field, Mapping) else {}
    text = _comments(known, indent)
    default = _default(known)
    if isinstance(variants := known.get("oneOf"), list):
        text += f"{indent}// {default}\n" if default else ""
        said = _said(known)  # repeated neither in the first variant nor in one with the same description
        rows = "".join(
            f"{indent} | {_variant(variant, indent, told=said is not None and said in (_said(variant), first))}\n"
            for first, variant in zip([said, *[None] * len(variants)], variants, strict=False)
        )
        return f"{text}{indent}{name}:\n{rows}{indent},\n"
    written = _nullable(type_of(field, f"{indent}    "), known)
    return f"{text}{indent}{name}: {written},{f' // {default}' if default else ''}\n"


def _comments(field: Mapping[str, Any], indent: str) -> str:
    text, described = "", ""
    title, description, examples = (field.get(name) for name in ("title", "description", "examples"))
    if isinstance(title, str):
        text += f"{indent}// {title}\n{indent}//\n"
    if isinstance(description, str) and not _says_its_first_variant(field, description):
        described = f"{indent}// {description}\n"
    if isinstance(examples, list) and examples:
        shown = [f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str)]
        exemplified = f"{indent}// Examples:\n" + "".join(shown)
        return text + (exemplified + described if "oneOf" in field else described + exemplified)
    return text + described


def _says_its_first_variant(field: Mapping[str, Any], description: str) -> bool:
    variants = field.get("oneOf")
    first = variants[0] if isinstance(variants, list) and variants else None
    return isinstance(first, Mapping) and first.get("description") == description


def _nullable(written: str, field: Mapping[str, Any]) -> str:
    return f"{written} | null" if field.get("nullable") is True and "null" not in written else written


def _variant(variant: Any, indent: str, *, told: bool = False) -> str:
    known = variant if isinstance(variant, Mapping) else {}
    notes = [note for note in (None if told else _said(known), _default(known)) if note is not None]
    written = _nullable(type_of(variant, f"{indent}   "), known)
    return f"{written} // {' '.join(notes)}" if notes else written


def _said(field: Any) -> str | None:
    described = field.get("description") if isinstance(field, Mapping) else None
    return described if isinstance(described, str) else None


def _default(field: Mapping[str, Any]) -> str | None:
    if "default" not in field:
        return None
    value = field["default"]
    if isinstance(value, str):
        return f"default: {value}" if _choices(field) else f'default: "{value}"'
    return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"


def _choices(field: Mapping[str, Any]) -> list[Any]:
    choices = field.get("enum")
    return choices if isinstance(choices, list) else []
