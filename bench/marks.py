"""Which reports are of today's code. Older ones carry a mark, on their page and wherever a document cites them.

A report of the CPU engine or of the server belongs to the text of its sources, one of a GPU to machine code. Nobody has
to measure because code was edited: `python bench/index.py` writes the marks, on the page of reports and in the text of
the links that cite a report. The page names the sources for which the marks were written, so that a test can tell a
mark that is wrong from code that was edited since.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from report import MEASURED_SOURCES, kind_of, sources_hash

_MARK = r"of (?:an earlier kernel|earlier sources), commit \w+"
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^)#\s]+\.json)(#[^)\s]*)?\)")
_WRITTEN_FOR = re.compile(r"^\| sources of the (\w+) \| (\w+) \|$", re.MULTILINE)
_SECTION = re.compile(
    r"^## \[[^\]]*\]\(([^)]+\.json)\)$.*?^\| measured code \| ([^|]*) \|$", re.MULTILINE | re.DOTALL
)


class Standing(Enum):
    """What is known of the code that a report measured."""

    TODAY = "as it is today"
    EARLIER = "an earlier one"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class Marks:
    """The mark of each report, by file name ("" for one of today's code), and the sources they were written for."""

    written_for: Mapping[str, str]
    of: Mapping[str, str]


def standing(report: Mapping[str, Any]) -> Standing:
    kind = kind_of(report)
    if kind == "cuda":
        return Standing.EARLIER  # it names no machine code
    return Standing.TODAY if report.get("sources") == sources_hash(kind) else Standing.EARLIER


def mark(report: Mapping[str, Any], found: Standing) -> str:
    """What the page and every citation of a report say of it."""
    if found is Standing.TODAY:
        return ""
    what = "an earlier kernel" if kind_of(report) == "cuda" else "earlier sources"
    return f"of {what}, commit {str(report.get('commit', 'unknown'))[:7]}"


def marks_of(reports: Mapping[str, Mapping[str, Any]]) -> Marks:
    """The marks that are true now."""
    return Marks(
        {kind: sources_hash(kind) for kind in MEASURED_SOURCES},
        {name: mark(report, standing(report)) for name, report in reports.items()},
    )


def marks_on(page: str) -> Marks:
    """The marks that the page of reports has."""
    of = {name: found if re.fullmatch(_MARK, found) else "" for name, found in _SECTION.findall(page)}
    return Marks(dict(_WRITTEN_FOR.findall(page)), of)


def with_marks(text: str, document: str, marks: Marks) -> str:
    """A document whose citations say what their reports are marked with, and nothing else of that kind."""

    def cited(match: re.Match[str]) -> str:
        words, target, field = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(document), target))
        if not path.startswith("reports/"):
            return match.group()
        wanted = marks.of.get(os.path.basename(path), "")
        plain = re.sub(rf" ?{_MARK}$", "", words)
        return f"[{plain}{f' {wanted}' if wanted else ''}]({target}{field or ''})"

    return _LINK.sub(cited, text)


def wrong_marks(page: Marks, reports: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    """A sentence for each report of a kind that the page does not mark as it should."""
    true = marks_of({name: report for name, report in reports.items() if kind_of(report) == kind})
    return [
        f"{name} is marked {page.of.get(name)!r}, and should be {wanted!r}"
        for name, wanted in true.of.items()
        if page.of.get(name) != wanted
    ]
