"""No performance number in the documentation lacks a field of a file that proves it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import claims
from claims import Claim
from fields import Measured, NoField, field_names, field_of


def found(text: str, document: str = "README.md") -> list[Claim]:
    every = list(claims.claims_in(document, text))
    return [claim for claim in every if isinstance(claim, Claim)]


def proven(claim: Claim) -> bool:
    return claim.complaint() is None


def test_every_number_in_the_documentation_is_proven() -> None:
    """The rule is at the top of bench/claims.py."""
    assert [text for claim in claims.all_claims() if (text := claim.complaint()) is not None] == []


def shifted(claim: Claim, percent: float) -> Claim:
    """As an author would write a number that is so many percent larger."""
    return replace(claim, digits=f"{claim.value * (1 + percent / 100):,.{claim.decimals}f}")


def is_tie(claim: Claim) -> bool:
    """A field in the middle between two numbers, 1.195 us say: either of them is right."""
    found = field_of(claims.ROOT / claim.file, claim.field).value / claims.UNITS[claim.unit][1]
    return abs(abs(found - claim.value) - 0.5 * 10**-claim.decimals) < 1e-9


@pytest.mark.parametrize("percent", [*range(-10, 0), *range(1, 11)])
def test_no_number_that_is_a_little_wrong_is_proven(percent: int) -> None:
    every = [claim for claim in claims.all_claims() if isinstance(claim, Claim)]
    moved = [(claim, shifted(claim, percent)) for claim in every]
    wrong = [other for claim, other in moved if other.value != claim.value and not is_tie(claim)]
    assert len(wrong) > len(every) // 2
    assert [claim.text for claim in wrong if proven(claim)] == []


@pytest.mark.parametrize(
    "text",
    [
        "It reaches 1,290 tok/s.", "| us | 62.5 % |", "- 3x faster", "at 4.58 TB/s", "## 20 ms to the first token",
        "takes 0.87 us or\n2.34 us", "50 percent of it", "10 tokens per second",
    ],
)  # fmt: skip
def test_performance_numbers_are_found(text: str) -> None:
    assert len(found(text)) >= 1
    assert not any(proven(claim) for claim in found(text))


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
    speed = {"median": 25.04, "min": 20.0, "max": 31.0, "runs": 5}
    report = {
        "read_bandwidth": 2.1034e10,
        "results": [
            {"context": 32, "dtype": "bf16", "tokens_per_second": speed, "share": 0.6612, "fast_share": True},
            {
                "context": 1024, "dtype": "bf16", "tokens_per_second": 24.0, "first_us": 1500.0,
                "joules_per_token": 0.31, "speeds_ms": {"0": 7.0},
            },
        ],
        "peers": {"llama.cpp, Q8_0": {**speed, "median": 17.0}, "another": speed},
    }  # fmt: skip
    (tmp_path / "reports" / "some.json").write_text(json.dumps(report))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text("LIMIT_MS = 150\nBIG_US = 1_234\nCOMPUTED_MS = len('a')")
    (tmp_path / "src" / "monotape").mkdir(parents=True)
    limits = "class Limits:\n    idle_s: float = 75.0\n    head_s: float = 20.0\n    gone_s: float\n"
    (tmp_path / "src" / "monotape" / "limits.py").write_text(limits)
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "field", "good"),
    [
        ("25 tok/s", "results[0].tokens_per_second", True), ("25.0 tok/s", "results[0].tokens_per_second", True),
        ("25.1 tok/s", "results[0].tokens_per_second", False), ("26 tok/s", "results[0].tokens_per_second", False),
        ("31 tok/s", "results[0].tokens_per_second.max", True), ("66 %", "results[0].share", True),
        ("66.1 %", "results[0].share", True), ("66.2%", "results[0].share", False), ("0.7x", "results[0].share", True),
        ("21.03 GB/s", "read_bandwidth", True), ("21.1 GB/s", "read_bandwidth", False),
        ("0.021 TB/s", "read_bandwidth", True), ("21.03 GB", "read_bandwidth", False),
        ("25 ms", "results[0].tokens_per_second", False), ("1.5 ms", "results[1].first_us", True),
        ("1500 ms", "results[1].first_us", False), ("0.3 J/token", "results[1].joules_per_token", True),
    ],
)  # fmt: skip
def test_a_number_must_be_the_field_that_the_link_names(
    root: Path, number: str, field: str, good: bool
) -> None:
    (claim,) = found(f"| speed | {number} | [report](reports/some.json#{field}) |")
    assert proven(claim) is good


def test_another_field_that_has_the_number_does_not_count(root: Path) -> None:
    (claim,) = found("25 tok/s ([report](reports/some.json#results[1].tokens_per_second))")
    assert not proven(claim)
    assert not proven(found("25 tok/s ([report](reports/some.json))")[0])


def test_a_link_proves_the_numbers_before_it_in_their_order(root: Path) -> None:
    text = "It reaches 25 tok/s,\n66 % ([r](reports/some.json#results[0]:tokens_per_second,share)), and reads"
    text += " 21 GB/s [r](reports/some.json#read_bandwidth)."
    assert [proven(claim) for claim in found(text)] == [True, True, True]
    swapped = text.replace("tokens_per_second,share", "share,tokens_per_second")
    assert [proven(claim) for claim in found(swapped)] == [False, False, True]
    assert [proven(claim) for claim in found(text.replace(",share", ""))] == [True, False, True]


def test_a_field_that_proves_nothing_is_told_of(root: Path) -> None:
    (claim,) = claims.claims_in("README.md", "Fast ([r](reports/some.json#read_bandwidth)).")
    assert claim.complaint() == "README.md: the link to reports/some.json names 1 fields for 0 numbers"


def test_links_count_for_their_own_row_item_or_paragraph(root: Path) -> None:
    link = "[r](reports/some.json#results[0].tokens_per_second)"
    text = f"25 tok/s\n\n{link}\n\n- 25 tok/s\n- 25 tok/s {link}\n\n| 25 tok/s |"
    assert [proven(claim) for claim in found(text)] == [False, False, True, False]
    assert not proven(found(f"{link} 25 tok/s")[0])


def test_links_are_relative_to_the_document(root: Path) -> None:
    field = "#results[0].tokens_per_second"
    assert proven(found(f"25 tok/s [r](../reports/some.json{field})", "docs/page.md")[0])
    assert not proven(found(f"25 tok/s [r](reports/some.json{field})", "docs/page.md")[0])


def test_a_constant_of_a_test_proves(root: Path) -> None:
    assert proven(found("under 150 ms ([test](tests/test_some.py#LIMIT_MS))")[0])
    assert proven(found("1,234 us ([test](tests/test_some.py#BIG_US))")[0])
    assert not proven(found("under 151 ms ([test](tests/test_some.py#LIMIT_MS))")[0])
    assert not proven(found("under 150 ms ([test](tests/test_some.py))")[0])
    assert not proven(found("1 ms ([test](tests/test_some.py#COMPUTED_MS))")[0])
    assert proven(found("75 s, 20 s ([limits](src/monotape/limits.py#Limits:idle_s,head_s))")[1])
    assert not proven(found("75 s ([limits](src/monotape/limits.py#Limits.gone_s))")[0])
    assert not proven(found("75 s ([limits](src/monotape/limits.py#idle_s))")[0])


def test_other_links_prove_nothing(root: Path) -> None:
    (root / "other.json").write_text('{"x_ms": 25}')
    assert not proven(found("25 ms [r](other.json#x_ms)")[0])
    assert not proven(found("25 ms [gone](reports/none.json#x_ms)")[0])


def test_a_complaint_says_what_the_field_is(root: Path) -> None:
    (claim,) = found("26 tok/s ([r](reports/some.json#results[0].tokens_per_second))")
    assert claim.complaint() == (
        "README.md: '26 tok/s' is not results[0].tokens_per_second of reports/some.json, 25.04 tokens per second"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("results[context=32].share", Measured(0.6612, "ratio")),
        ("results[context=1024&dtype=bf16].first_us", Measured(0.0015, "seconds")),
        ("peers[*Q8*]", Measured(17.0, "tokens per second")),
        ("results[1].speeds_ms.0", Measured(0.007, "seconds")),
    ],
)
def test_fields_are_found(root: Path, field: str, value: Measured) -> None:
    assert field_of(root / "reports" / "some.json", field) == Measured(
        pytest.approx(value.value), value.measure
    )


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("results[context=64].share", r"\[context=64\] fits 0 entries"), ("peers[*]", "fits 2 entries"),
        ("results[9].share", r"\[9\] fits 0"), ("gone", "there is no 'gone'"), ("results", "is no number"),
        ("results[0].context", "says no unit"), ("results[0", "cannot be read"), ("peers[llama*].x", "there is no 'x'"),
        ("results[0].fast_share", "is no number"), ("read_bandwidth[0]", "fits 0"),
    ],
)  # fmt: skip
def test_fields_that_are_not_there_say_why(root: Path, field: str, why: str) -> None:
    with pytest.raises(NoField, match=why):
        field_of(root / "reports" / "some.json", field)


def test_names_of_fields() -> None:
    assert field_names("") == []
    assert field_names("a.b,c") == ["a.b", "c"]
    assert field_names("a[b=1&c=2]:d,e.max") == ["a[b=1&c=2].d", "a[b=1&c=2].e.max"]
    assert field_names("peers[a%2C%20b]") == ["peers[a, b]"]
