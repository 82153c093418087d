"""Small JSON files and headers, read strictly: an object, no key twice, no NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monotape.errors import CheckpointError

#: Bounds the time that a wrong file takes, about a second. The longest honest ones, about 15 MB, are indexes of models
#: with more than a hundred thousand tensors.
JSON_BYTES_LIMIT = 30_000_000


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{where} is not valid JSON: {reason}.", "It is damaged: fetch it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds no JSON object.", "It is not what its name says.")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        size = path.stat().st_size
        if size > JSON_BYTES_LIMIT:
            raise CheckpointError(
                f"{path} has {size} bytes; at most {JSON_BYTES_LIMIT} make sense.",
                "It is not what its name says.",
            )
        text = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}.", "Is the folder complete?") from error
    return parse_object(text, str(path))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r} appears twice")
        table[key] = value
    return table


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")
