"""Finds numbers in the documentation that no file proves.

    python bench/claims.py

The rule, for README.md, ARCHITECTURE.md, CONTRIBUTING.md and docs/: every performance number (a number before tok/s,
GB/s, TB/s, ms, us, %, x, ...) stands before a link, in the same paragraph, list item or table row, that names the field
which proves it (bench/fields.py says how):

    1,691 tok/s, 88 % ([report](reports/a.json#results[context=32]:tokens_per_second,bandwidth_share))

A link proves the numbers between the link before it and itself, one field each, in their order. The field, in the unit
written, must round to the number. Evidence is a report under reports/, a data file of the planner, or a constant of the
sources or a test. Targets may stand at a document's end (bench/references.py). Code, link targets and HTML comments are
not looked at.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fields import Measured, NoField, field_names, field_of
from references import expanded

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
EVIDENCE = ("reports/", "src/monotape/", "tests/")
#: Units of performance: what they are a measure of, and how many of the plain unit (bench/fields.py) they are.
UNITS = {
    "tok/s": ("tokens per second", 1.0), "tokens/s": ("tokens per second", 1.0),
    "tokens per second": ("tokens per second", 1.0), "tokens a second": ("tokens per second", 1.0),
    "GB/s": ("bytes per second", 1e9), "TB/s": ("bytes per second", 1e12), "GB": ("bytes", 1e9), "MB": ("bytes", 1e6),
    "ms": ("seconds", 1e-3), "us": ("seconds", 1e-6), "µs": ("seconds", 1e-6), "s": ("seconds", 1.0),
    "seconds": ("seconds", 1.0), "%": ("ratio", 0.01), "percent": ("ratio", 0.01), "x": ("ratio", 1.0),
    "times": ("ratio", 1.0), "J/token": ("joules", 1.0), "J": ("joules", 1.0), "mJ": ("joules", 1e-3),
}  # fmt: skip
_NUMBER = (
    r"(?<![\w.,/-])(?P<digits>\d[\d,]*(?:\.\d+)?)\s?(?P<unit>"
    + "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
    + r")(?![\w/])"
)
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#([^)\s]*))?[^)]*\)")
_NUMBER_OR_LINK = re.compile(_NUMBER + r"|\x00(?P<link>\d+)\x00")
_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s")


@dataclass(frozen=True, slots=True)
class Claim:
    """A number in a document, and the field that is to prove it."""

    document: str
    text: str
    digits: str
    unit: str
    file: str = ""  # the evidence, or "" where no link follows
    field: str = ""  # of that file, or "" where the link names none for this number

    @property
    def value(self) -> float:
        return float(self.digits.replace(",", ""))

    @property
    def decimals(self) -> int:
        return len(self.digits.partition(".")[2])

    def complaint(self) -> str | None:
        """Why the number is not proven; None if it is."""
        if not self.file:
            return f"{self.document}: no link to evidence follows {self.text!r}"
        if not self.field:
            return f"{self.document}: the link to {self.file} names no field for {self.text!r}"
        try:
            found = field_of(ROOT / self.file, self.field)
        except NoField as error:
            return f"{self.document}: {self.text!r}: {error}"
        if self._is(found):
            return None
        return f"{self.document}: {self.text!r} is not {self.field} of {self.file}, {found.value:.6g} {found.measure}"

    def _is(self, found: Measured) -> bool:
        measure, size = UNITS[self.unit]
        half = 0.5 * 10**-self.decimals * (1 + 1e-9)
        return found.measure == measure and abs(found.value / size - self.value) <= half


def blocks(text: str) -> Iterator[str]:
    """Table rows, list items and paragraphs, without code and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    block: list[str] = []
    for line in text.splitlines():
        indented_code = line.startswith("    ") and not block
        starts_anew = not line.strip() or line.lstrip().startswith("|") or _ITEM.match(line) is not None
        if starts_anew or indented_code:
            if block:
                yield " ".join(block)
            block = []
        if line.strip() and not indented_code:
            block.append(line.strip())
            if line.lstrip().startswith("|"):
                yield block.pop()
    if block:
        yield " ".join(block)


@dataclass(frozen=True, slots=True)
class Useless:
    """A link that names another number of fields than there are numbers before it."""

    document: str
    file: str
    fields: int
    numbers: int

    def complaint(self) -> str:
        return (
            f"{self.document}: the link to {self.file} names {self.fields} fields for {self.numbers} numbers"
        )


def claims_in(document: str, text: str) -> Iterator[Claim | Useless]:
    """Every number, and every link that does not fit the numbers before it."""
    for block in blocks(text):
        yield from _claims_of(document, block)


def _claims_of(document: str, block: str) -> Iterator[Claim | Useless]:
    links: list[tuple[str, list[str]]] = []

    def placeholder(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(document), match[1]))
        if not target.startswith(EVIDENCE):
            return " "
        links.append((target, field_names(match[2] or "")))
        return f"]\x00{len(links) - 1}\x00"

    prose = _LINK.sub(placeholder, re.sub(r"`[^`]*`", " ", block))
    waiting: list[Claim] = []
    for match in _NUMBER_OR_LINK.finditer(re.sub(r"https?://\S+", " ", prose)):
        if match["link"] is None:
            waiting.append(Claim(document, match.group(), match["digits"], match["unit"]))
            continue
        file, fields = links[int(match["link"])]
        for number, claim in enumerate(waiting):
            field = fields[number] if number < len(fields) else ""
            yield Claim(document, claim.text, claim.digits, claim.unit, file, field)
        if len(fields) > len(waiting):
            yield Useless(document, file, len(fields), len(waiting))
        waiting = []
    yield from waiting


def documents() -> Iterator[Path]:
    for name in DOCUMENTS:
        if (ROOT / name).is_file():
            yield ROOT / name
    yield from sorted((ROOT / "docs").rglob("*.md"))


def all_claims() -> Iterator[Claim | Useless]:
    for path in documents():
        yield from claims_in(str(path.relative_to(ROOT)), expanded(path.read_text("utf-8")))


def main() -> int:
    claims = list(all_claims())
    bad = [complaint for claim in claims if (complaint := claim.complaint()) is not None]
    for complaint in bad:
        print(complaint)
    print(f"{len(claims)} performance numbers, {len(bad)} without proof")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
