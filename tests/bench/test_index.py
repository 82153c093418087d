"""The page of reports: generated, complete, and as committed."""

from __future__ import annotations

from typing import Any

import index
from marks import Marks, judge, marks_on, new_marks
from monotape.planner.reports import load_reports
from planner.test_reports import decode_report
from references import expanded
from report import ROOT


def test_the_page_is_what_the_reports_say() -> None:
    """Write it anew with `python bench/index.py`."""
    text = index.PAGE.read_text("utf-8")
    assert text == index.page(load_reports(index.REPORTS), marks_on(text))


def test_generated_tables_are_what_the_reports_say() -> None:
    """Write them anew with `python bench/index.py`."""
    stale = [
        path.name for path, text in index.pages(compiling=False).items() if path.read_text("utf-8") != text
    ]
    assert stale == []


def test_every_report_is_on_the_page_of_performance() -> None:
    """Nothing that was measured is left out of the documentation."""
    pages = [ROOT / "docs" / "performance.md", ROOT / "docs" / "delayed-tensor-parallelism.md"]
    text = "".join(expanded(page.read_text("utf-8")) for page in pages)
    assert [name for name in load_reports(index.REPORTS) if f"](../reports/{name}" not in text] == []


def shown(reports: dict[str, dict[str, Any]]) -> str:
    return index.page(reports, new_marks(Marks({}, {}), judge(reports)))


def test_a_report_shows_how_it_came_about() -> None:
    text = shown({"some.json": decode_report(uncommitted_changes=True)})
    for wanted in (
        "[some](some.json)", "`python bench/decode.py --save`", "aarch64, Some CPU",
        "0123456789ab and uncommitted changes",
        "feedbeef00112233", "2026-11-15", "read bandwidth | 21.000 GB/s", "weight bytes | 0.527 GB",
    ):  # fmt: skip
        assert wanted in text


def test_a_measurement_shows_its_spread() -> None:
    text = shown({"some.json": decode_report()})
    assert "| context 32 | tokens per second 25 (24 to 26.5, 5 runs);" in text
    assert "bandwidth share 0.66" in text
    assert "| llama.cpp | 20 (19 to 21, 5 runs) |" in text


def test_results_named_by_words() -> None:
    report = {
        "name": "x",
        "runs": [{"engine": "monotape", "passed": 20}, {"engines": ["a", "b"], "same_tokens": 40}],
    }
    text = shown({"x.json": report})
    assert "| monotape | passed 20 |" in text
    assert "| a and b | same tokens 40 |" in text


def test_spreads_by_a_setting() -> None:
    speed = {"median": 2000.0, "min": 1999.0, "max": 2001.0, "runs": 3}
    rows = [{"model": "dense-2b", "ranks": 8, "tokens_per_second": {"0": speed, "2": speed}, "padded": {}}]
    text = shown({"x.json": {"name": "x", "results": rows}})
    assert "| dense-2b | ranks 8; tokens per second at 0 2,000 (1,999 to 2,001, 3 runs); tokens" in text
    assert "per second at 2 2,000" in text


def test_no_reports_make_a_page_too() -> None:
    assert "Nothing has been measured yet." in shown({})
