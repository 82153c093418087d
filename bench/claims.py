"""Finds numbers in the documentation that no file proves.

    python bench/claims.py

The rule, for README.md, ARCHITECTURE.md, CONTRIBUTING.md and docs/: every performance number (a number before tok/s,
GB/s, TB/s, ms, us, %, x, ...) stands in a paragraph, list item or table row that links a file which holds it: a report
under reports/, a data file of the planner, or a test. A JSON file holds a number if one of its values, in the unit
written, rounds to it; a test holds it if it spells it. Code, link targets and HTML comments are not looked at.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
EVIDENCE = ("reports/", "src/monotape/planner/data/", "tests/")
#: Units of performance, and by what a value in a report is multiplied to be in that unit.
UNITS = {
    "tok/s": (1.0,), "tokens/s": (1.0,), "tokens per second": (1.0,), "tokens a second": (1.0,),
    "GB/s": (1.0, 1e-9, 1e3), "TB/s": (1.0, 1e-12, 1e-3), "GB": (1.0, 1e-9), "MB": (1.0, 1e-6),
    "ms": (1.0, 1e3, 1e-3), "us": (1.0, 1e6), "µs": (1.0, 1e6), "s": (1.0, 1e-3), "seconds": (1.0, 1e-3),
    "%": (1.0, 100.0), "percent": (1.0, 100.0), "x": (1.0,), "times": (1.0,),
}  # fmt: skip
_NUMBER = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)\s?("
    + "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
    + r")(?![\w/])"
)
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s")


@dataclass(frozen=True, slots=True)
class Claim:
    """A number in a document, and the files that its block links."""

    document: str
    text: str
    value: float
    decimals: int
    unit: str
    links: tuple[str, ...]

    def proven(self) -> bool:
        return any(self._in(ROOT / link) for link in self.links)

    def _in(self, path: Path) -> bool:
        if not path.is_file():
            return False
        if path.suffix == ".json":
            return any(self._matches(value) for value in numbers(json.loads(path.read_text("utf-8"))))
        plain = re.sub(r"(?<=\d)[_,](?=\d)", "", path.read_text("utf-8"))
        digits = self.text.split()[0].replace(",", "").rstrip("%x")
        return re.search(rf"(?<![\d.]){re.escape(digits)}(?![\d.]*\d)", plain) is not None

    def _matches(self, value: float) -> bool:
        half = 0.5 * 10**-self.decimals * (1 + 1e-9)
        return any(abs(value * scale - self.value) <= half for scale in UNITS[self.unit])


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


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


def claims_in(document: str, text: str) -> Iterator[Claim]:
    folder = os.path.dirname(document)
    for block in blocks(text):
        targets = (os.path.normpath(os.path.join(folder, link)) for link in _LINK.findall(block))
        links = tuple(target for target in targets if target.startswith(EVIDENCE))
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", block)
        for match in _NUMBER.finditer(prose):
            digits, unit = match.groups()
            decimals = len(digits.partition(".")[2])
            yield Claim(document, match.group(), float(digits.replace(",", "")), decimals, unit, links)


def documents() -> Iterator[Path]:
    for name in DOCUMENTS:
        if (ROOT / name).is_file():
            yield ROOT / name
    yield from sorted((ROOT / "docs").rglob("*.md"))


def all_claims() -> Iterator[Claim]:
    for path in documents():
        yield from claims_in(str(path.relative_to(ROOT)), path.read_text("utf-8"))


def complaint(claim: Claim) -> str:
    why = f"is not in {', '.join(claim.links)}" if claim.links else "links no report"
    return f"{claim.document}: {claim.text!r} {why}"


def main() -> int:
    claims = list(all_claims())
    bad = [claim for claim in claims if not claim.proven()]
    for claim in bad:
        print(complaint(claim))
    print(f"{len(claims)} performance numbers, {len(bad)} without proof")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
