"""Which reports are of today's code. Older ones carry a mark, on their page and wherever a document cites them.

A report of the CPU engine or of the server belongs to the code of its sources (bench/bare_code.py), one of a GPU to the
machine code of its kernels (bench/machine_code.py). Edits of comments change neither. An edit of the code needs no new
measurement: `python bench/index.py` writes the marks, on the page of reports and in the links that cite a report. The
page names the sources for which the marks were written, so that a test can distinguish a wrong mark from code that was
edited since.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from machine_code import Finding, Standing, finding
from report import MEASURED_SOURCES, kind_of, sources_hash

_MARK = r"of (?:an earlier kernel|earlier sources), commit \w+"
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^)#\s]+\.json)(#[^)\s]*)?\)")
_WRITTEN_FOR = re.compile(r"^\| sources of the (\w+) \| (\w+) \|$", re.MULTILINE)
_SECTION = re.compile(
    r"^## \[[^\]]*\]\(([^)]+\.json)\)$.*?^\| measured code \| ([^|]*) \|$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Marks:
    """The mark of each report, by file name ("" for one of today's code), and the sources they were written for."""

    written_for: Mapping[str, str]
    of: Mapping[str, str]


def standing(report: Mapping[str, Any], *, compiling: bool = False) -> Finding:
    kind = kind_of(report)
    if kind == "cuda":
        return finding(report, compiling=compiling)
    same = report.get("sources") == sources_hash(kind)
    return Finding(Standing.TODAY if same else Standing.EARLIER)


def mark(report: Mapping[str, Any], found: Standing) -> str:
    """What the page and every citation of a report say of it."""
    if found is Standing.TODAY:
        return ""
    what = "an earlier kernel" if kind_of(report) == "cuda" else "earlier sources"
    return f"of {what}, commit {str(report.get('commit', 'unknown'))[:7]}"


@dataclass(frozen=True, slots=True)
class Judged:
    """The true mark of each report where it is known, and for the others why it is not."""

    of: Mapping[str, str]
    untold: Mapping[str, str]


def judge(reports: Mapping[str, Mapping[str, Any]], *, compiling: bool = False) -> Judged:
    found = {name: standing(report, compiling=compiling) for name, report in reports.items()}
    untold = {name: one.why for name, one in found.items() if one.standing is Standing.UNKNOWN}
    told = {name: mark(reports[name], one.standing) for name, one in found.items() if name not in untold}
    return Judged(told, untold)


def new_marks(page: Marks, judged: Judged) -> Marks:
    """For the page: a report whose mark is unknown keeps the one it has, and the page the sources of its kernels."""
    written_for = {kind: sources_hash(kind) for kind in MEASURED_SOURCES}
    if judged.untold:
        written_for["cuda"] = page.written_for.get("cuda", "")
    return Marks(written_for, {**judged.of, **{name: page.of[name] for name in judged.untold}})


def marks_on(page: str) -> Marks:
    """The marks that the page of reports has."""
    of = {name: found if re.fullmatch(_MARK, found) else "" for name, found in _SECTION.findall(page)}
    return Marks(dict(_WRITTEN_FOR.findall(page)), of)


def same_marks(page: str, reports: Mapping[str, Mapping[str, Any]]) -> Marks:
    """The marks that the page has. A report that is new on it and not of a GPU is judged, which compiles nothing."""
    before = marks_on(page)
    new = {name: one for name, one in reports.items() if name not in before.of and kind_of(one) != "cuda"}
    return Marks(before.written_for, {**before.of, **judge(new).of})


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


def wrong_marks(page: Marks, judged: Judged) -> list[str]:
    """A sentence for each report that the page does not mark as it should."""
    return [
        f"{name} is marked {page.of.get(name)!r}, and should be {wanted!r}"
        for name, wanted in judged.of.items()
        if page.of.get(name) != wanted
    ]
