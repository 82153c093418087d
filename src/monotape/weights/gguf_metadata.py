"""Typed access to a GGUF file's metadata: the value a key must have, or an error with the key's name."""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.gguf_header import GgufArray, Value
from monotape.weights.mapped import MappedFile

_U64 = Struct("<Q")


class Metadata:
    """The metadata of one file. A key that is absent gives the default; one of the wrong type is an error."""

    __slots__ = ("_mapped", "_values")

    def __init__(self, mapped: MappedFile, values: dict[str, Value]) -> None:
        self._mapped = mapped
        self._values = values

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._values)

    def integer(self, key: str, default: int | None = None) -> int | None:
        """An integer; an array of equal entries counts as one (some files repeat it for every layer)."""
        value = self._values.get(key, default)
        if isinstance(value, GgufArray) and value.count and not value.strings:
            entries = self.numbers(key)
            if not (entries == entries[0]).all():
                raise CheckpointError(
                    f"{self._mapped.path}: {key} differs from layer to layer.", "Use another model."
                )
            value = entries[0].item()
        if value is not None and type(value) is not int:
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number. Files hold float32; the shortest decimal of that is what the model's author wrote."""
        value = self._values.get(key, default)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise self._wrong(key, "a number")
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))  # type: ignore[arg-type]

    def scalar(self, key: str) -> int | float | bool | None:
        """A number or a truth value, whichever the file has; None for anything else."""
        value = self._values.get(key)
        return value if isinstance(value, int | float) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "a boolean")
        return value

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, bytes):
            raise self._wrong(key, "a text")
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(key, "UTF-8 text") from None

    def count(self, key: str) -> int:
        """How many entries an array has; 0 when there is none."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise self._wrong(key, "an array")
        return 0 if value is None else value.count

    def numbers(self, key: str) -> NDArray[Any]:
        """An array of numbers; empty when there is none."""
        value = self._values.get(key)
        if value is None:
            return np.empty(0, np.int32)
        if not isinstance(value, GgufArray) or value.strings:
            raise self._wrong(key, "an array of numbers")
        return self._mapped.array(value.offset, value.bytes, key).view(value.dtype)

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of texts; empty when there is none. Builds them all: 150 thousand for a vocabulary."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, GgufArray) or not value.strings:
            raise self._wrong(key, "an array of texts")
        block = self._mapped.copy(value.offset, value.bytes, key)
        self._mapped.release(value.offset, value.bytes)
        found: list[str] = []
        position, unpack = 0, _U64.unpack_from
        try:
            for _ in range(value.count):
                end = position + 8 + unpack(block, position)[0]
                found.append(block[position + 8 : end].decode("utf-8"))
                position = end
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self._mapped.path}: entry {len(found)} of {key} is not UTF-8 text.",
                "Convert the model again with a current converter.",
            ) from None
        return tuple(found)

    def _wrong(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._mapped.path}: {key} is not {expected}.", "Convert the model again.")
