"""Rows of generated tables: each number is read from a field of a report, and the row ends with a link that names it.

The link has the form that bench/claims.py checks, so a generated number is proven like one written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from claims import UNITS
from fields import NoField, field_in

Report = Mapping[str, Any]


def shown(value: float, unit: str) -> str:
    """Three significant digits, and no fewer than the integer part has: 1,690 tok/s, 88.4 %, 1.51 ms."""
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    if 99.9 < value < 100:
        decimals = 2  # a share must not be rounded up to all of it
    space = "" if unit == "x" else " "
    return f"{value:,.{decimals}f}{space}{unit}"


class Row:
    """Cells of a table's row, and the fields that prove the numbers in them."""

    def __init__(self, name: str, report: Report, place: str = "", folder: str = "../reports") -> None:
        self.report, self.place = report, place
        self._target = f"{folder}/{name}"
        self._cells: list[str] = []
        self._fields: list[str] = []

    def text(self, words: object) -> Row:
        """A cell without a number that needs proof."""
        self._cells.append(f"{words:,}" if isinstance(words, int) else str(words))
        return self

    def number(self, field: str, unit: str, missing: str = "") -> Row:
        """A cell with the value of a field of this row's place in the report; `missing` where there is none."""
        return self.numbers([(field, unit)], missing)

    def numbers(self, fields: Iterable[tuple[str, str]], missing: str = "") -> Row:
        """A cell with several values; those that the report does not have are left out."""
        found = [text for field, unit in fields if (text := self._take(field, unit))]
        return self.text(", ".join(found) or missing)

    def series(self, fields: Sequence[tuple[str, str]], missing: str) -> Row:
        """A cell with one value per field, in order; `missing` in the place of each that the report does not have."""
        found = [self._take(field, unit) for field, unit in fields]
        return self.text(", ".join(text or missing for text in found) if any(found) else missing)

    def _take(self, field: str, unit: str) -> str:
        measure, size = UNITS[unit]
        try:
            value = field_in(self.report, f"{self.place}.{field}" if self.place else field)
        except NoField:
            return ""
        assert value.measure == measure, f"{field} is not in {unit}"
        self._fields.append(field)
        return shown(value.value / size, unit)

    def __str__(self) -> str:
        place = f"{self.place}:" if self.place else ""
        fragment = f"#{place}{','.join(self._fields)}" if self._fields else ""
        return f"| {' | '.join(self._cells)} | [report]({self._target}{fragment}) |"


def table(head: Iterable[str], rows: Iterable[Row]) -> str:
    """Nothing at all where there is nothing to show."""
    columns, lines = [*head, "evidence"], [str(row) for row in rows]
    if not lines:
        return ""
    rule = "| " + " | ".join("---" for _ in columns) + " |"
    return "\n".join(["", f"| {' | '.join(columns)} |", rule, *lines, "", ""])
