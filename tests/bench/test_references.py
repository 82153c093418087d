"""Targets of links to evidence stand at a document's end, and the tools read them as if they stood in the links."""

from __future__ import annotations

from pathlib import Path

import pytest

from claims import documents
from references import expanded, gathered

ONE, OTHER = "reports/a.json#results[context=32]:speed,share", "reports/b.json#x[a=b*c].y"
INLINE = (
    f"Fast ([report]({ONE})).\n\n| 3 tok/s | [report of an earlier kernel]({OTHER}) |\n\n"
    f"Again ([the same]({ONE})).\n"
)
SHORT = (
    "Fast ([report][e1]).\n\n| 3 tok/s | [report of an earlier kernel][e2] |\n\nAgain ([the same][e1]).\n"
    f"\n[e1]: {ONE}\n[e2]: {OTHER}\n"
)


def test_targets_go_to_the_end_each_once() -> None:
    assert gathered(INLINE) == SHORT
    assert gathered(SHORT) == SHORT


def test_targets_come_back() -> None:
    assert expanded(SHORT) == INLINE
    assert expanded(INLINE) == INLINE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "`[slot][e1]` is code\n",
        "[a](reports/a.json), [b](b.md#c), [c][d]\n",
        "a\n\n[e1]: b.json#c is a word\n",
    ],
)
def test_other_links_stay(text: str) -> None:
    assert gathered(text) == expanded(text) == text


def test_numbers_are_numbered_anew_when_a_link_comes_first() -> None:
    assert gathered(f"[new](reports/c.json#f)\n{SHORT}").startswith("[new][e1]\nFast ([report][e2])")


@pytest.mark.parametrize("path", list(documents()), ids=lambda path: path.name)
def test_no_document_has_such_targets_in_its_text(path: Path) -> None:
    """Move them with `python bench/index.py --same-marks`."""
    text = path.read_text("utf-8")
    assert gathered(text) == text
