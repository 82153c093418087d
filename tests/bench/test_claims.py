"""No performance number in the documentation lacks a file that holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import claims
from claims import Claim


def found(text: str, document: str = "README.md") -> list[Claim]:
    return list(claims.claims_in(document, text))


def test_every_number_in_the_documentation_is_proven() -> None:
    """The rule is at the top of bench/claims.py."""
    assert [claims.complaint(claim) for claim in claims.all_claims() if not claim.proven()] == []


@pytest.mark.parametrize(
    "text",
    [
        "It reaches 1,290 tok/s.", "| us | 62.5 % |", "- 3x faster", "at 4.58 TB/s", "## 20 ms to the first token",
        "takes 0.87 us or\n2.34 us", "50 percent of it", "10 tokens per second",
    ],
)  # fmt: skip
def test_performance_numbers_are_found(text: str) -> None:
    assert len(found(text)) >= 1
    assert not any(claim.proven() for claim in found(text))


@pytest.mark.parametrize(
    "text",
    [
        "Python 3.11 and 24 layers", "`20 tok/s`", "```\n20 tok/s\n```", "<!-- 20 tok/s -->", "    20 tok/s",
        "[a link](https://example.org/20%)", "the 8x7B model", "version 1.2.3", "Apache-2.0", "40 problems",
    ],
)  # fmt: skip
def test_other_numbers_and_code_are_left_alone(text: str) -> None:
    assert found(text) == []


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reports").mkdir()
    report = {
        "read_bandwidth": 2.1034e10,
        "results": [{"tokens_per_second": {"median": 25.04}, "share": 0.6612}],
    }
    (tmp_path / "reports" / "some.json").write_text(json.dumps(report))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text("LIMIT_MS = 150\nBIG = 1_234")
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "proven"),
    [
        ("25 tok/s", True), ("25.0 tok/s", True), ("25.1 tok/s", False), ("26 tok/s", False), ("66 %", True),
        ("66.1 %", True), ("66.2%", False), ("21.03 GB/s", True), ("21.1 GB/s", False), ("2 tok/s", False),
    ],
)  # fmt: skip
def test_a_number_must_be_in_the_linked_report(root: Path, number: str, proven: bool) -> None:
    (claim,) = found(f"| speed | {number} | [report](reports/some.json) |")
    assert claim.proven() is proven


def test_links_count_for_their_own_row_item_or_paragraph(root: Path) -> None:
    text = (
        "[r](reports/some.json)\n\n25 tok/s\n\n- 25 tok/s\n- 25 tok/s [r](reports/some.json)\n\n| 25 tok/s |"
    )
    assert [claim.proven() for claim in found(text)] == [False, False, True, False]
    two_lines = "It reaches 25 tok/s,\nas [measured](reports/some.json)."
    assert [claim.proven() for claim in found(two_lines)] == [True]


def test_links_are_relative_to_the_document(root: Path) -> None:
    assert found("25 tok/s [r](../reports/some.json)", "docs/page.md")[0].proven()
    assert not found("25 tok/s [r](reports/some.json)", "docs/page.md")[0].proven()


def test_a_test_proves_what_it_spells(root: Path) -> None:
    assert found("under 150 ms ([test](tests/test_some.py))")[0].proven()
    assert found("1,234 ms ([test](tests/test_some.py))")[0].proven()
    assert not found("under 15 ms ([test](tests/test_some.py))")[0].proven()
    assert not found("under 50 ms ([test](tests/test_some.py))")[0].proven()


def test_other_links_prove_nothing(root: Path) -> None:
    (root / "other.json").write_text("[25]")
    assert not found("25 tok/s [r](other.json) [gone](reports/none.json)")[0].proven()
