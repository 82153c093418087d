"""A config.json as the planner reads it: what it reads is checked, and the rest may be anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monotape.models.fields import Fields


class ConfigFields(Fields):
    """Fields of objects within objects. The planner only counts, so it does not refuse fields that it does not read."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", prefix: str = "") -> None:
        super().__init__(values, where, prefix)
        self._mapping = values
        self._place = where

    def inner(self, name: str) -> ConfigFields:
        """A nested object that must be there."""
        value = self._mapping.get(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "must be an object")
        return ConfigFields(value, self._place, f"{self.label(name)}.")

    def has(self, name: str) -> bool:
        return self._mapping.get(name) is not None
