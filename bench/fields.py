"""Fields of reports, as links name them after a #, and in which unit they are.

    answered                                                 one field
    results[context=32].tokens_per_second                    of the one entry of a list with that context; its median
    clients[streaming=True&share_of_tokens=0].idle_after_ms.max
    peers[*Q8_0*]                                            an entry of an object by a pattern that fits it alone
    engines[0].tokens_per_second                             by its place
    results[context=32]:tokens_per_second,bandwidth_share    several fields of one place
    LIMIT_MS, Limits.idle_s                                  a constant of a Python file, the default of a class

The name of a field says its unit: first_token_ms, p50_us, bandwidth_share, tokens_per_second.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_SPREAD = {"median", "min", "max", "runs"}
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]*)\]")
#: The end of a field's name: what it measures, and how many of the plain unit one of it is.
_MEASURES = (
    (r"(.*_)?tokens_per_second|rate|peers", "tokens per second", 1.0),
    (r"joules_per_token", "joules", 1.0),
    (r"(.*_)?us", "seconds", 1e-6),
    (r"(.*_)?ms", "seconds", 1e-3),
    (r"(.*_)?(s|seconds)", "seconds", 1.0),
    (r"(.*_)?(bandwidth|bytes_per_second)", "bytes per second", 1.0),
    (r"(.*_)?(bytes|memory_used|memory_after_load|bytes_per_token)", "bytes", 1.0),
    (r"(.*_)?(share|over|times_as_fast)(_.*)?", "ratio", 1.0),
    (r"(.*_)?percent", "ratio", 0.01),
)


class NoField(Exception):
    """A link names what is not there, or what has no unit."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A value in its plain unit: seconds, bytes, tokens per second, a ratio."""

    value: float
    measure: str


def field_names(fragment: str) -> list[str]:
    """The whole names of the fields that a link names."""
    if not fragment:
        return []
    place, colon, names = fragment.rpartition(":")
    return [unquote(f"{place}.{name}" if colon else name) for name in names.split(",")]


def field_of(path: Path, field: str) -> Measured:
    """The value that a file has under a name."""
    if not path.is_file():
        raise NoField(f"there is no {path.name}")
    value = (
        _constant(path, field) if path.suffix == ".py" else _find(json.loads(path.read_text("utf-8")), field)
    )
    return _measured(value, field, path.name)


def field_in(report: Mapping[str, Any], field: str) -> Measured:
    """The value that a report which has been read already has under a name."""
    return _measured(_find(report, field), field, str(report.get("name", "the report")))


def _measured(value: Any, field: str, file: str) -> Measured:
    if isinstance(value, dict) and set(value) >= _SPREAD:
        value = value["median"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoField(f"{field} of {file} is no number")
    measure, size = _measure(field)
    return Measured(value * size, measure)


def _find(value: Any, field: str) -> Any:
    position = 0
    while position < len(field):
        match = _STEP.match(field, position)
        if match is None:
            raise NoField(f"{field!r} cannot be read from {field[position:]!r} on")
        value = _step(value, match[1]) if match[1] is not None else _chosen(value, match[2])
        position = match.end()
    return value


def _step(value: Any, name: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise NoField(f"there is no {name!r}")
    return value[name]


def _chosen(value: Any, chooser: str) -> Any:
    """The one entry of a list or an object that fits."""
    if isinstance(value, dict):
        found = [entry for name, entry in value.items() if fnmatchcase(name, chooser)]
    elif isinstance(value, list) and chooser.isdecimal():
        found = value[int(chooser) : int(chooser) + 1]
    elif isinstance(value, list):
        wanted = [condition.partition("=") for condition in chooser.split("&")]
        found = [
            entry
            for entry in value
            if all(fnmatchcase(str(entry.get(name)), pattern) for name, _, pattern in wanted)
        ]
    else:
        found = []
    if len(found) != 1:
        raise NoField(f"[{chooser}] fits {len(found)} entries")
    return found[0]


def _constant(path: Path, name: str) -> Any:
    *classes, last = name.split(".")
    body: list[ast.stmt] = ast.parse(path.read_text("utf-8")).body
    for wanted in classes:
        body = [
            part for one in body if isinstance(one, ast.ClassDef) and one.name == wanted for part in one.body
        ]
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if last in map(ast.unparse, targets):
                try:
                    return ast.literal_eval(statement.value)
                except ValueError:
                    break
    raise NoField(f"{path.name} has no constant {name}")


def _measure(field: str) -> tuple[str, float]:
    """By the last name that says a unit: idle_after_ms.max, or tokens_per_second[2]."""
    names = [match[1] for match in _STEP.finditer(field) if match[1] is not None and match[1] not in _SPREAD]
    for name in reversed(names):
        for pattern, measure, size in _MEASURES:
            if re.fullmatch(pattern, name.lower()):
                return measure, size
    raise NoField(f"the name of {field!r} says no unit")
