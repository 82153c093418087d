"""Generated tables: every cell is a field of a report, and a wrong place for one is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from claims import claims_in
from monotape.planner.reports import load_reports
from report import REPORTS
from rows import Row, shown, table
from tables import TABLES, with_tables

SPEED = {"median": 25.04, "min": 20.0, "max": 31.0, "runs": 5}
REPORT: dict[str, Any] = {
    "name": "decode-h200-x", "gpu": "h200", "model": "x",
    "results": [{"context": 1024, "tokens_per_second": SPEED, "bandwidth_share": 0.5, "peak_ms": 2.0}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1689.7, "tok/s", "1,690 tok/s"), (60.07, "tok/s", "60.1 tok/s"), (0.094557, "ms", "0.0946 ms"),
        (1.0110, "x", "1.01x"), (0.0, "%", "0 %"), (99.96, "%", "99.96 %"), (100.0, "%", "100 %"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_a_row_names_the_fields_of_its_numbers_in_order() -> None:
    row = Row("a.json", REPORT, "results[context=1024]").text(1024).number("tokens_per_second", "tok/s")
    row.number("sampled_over_greedy", "%", missing="not measured").number("bandwidth_share", "%")
    fields = "results[context=1024]:tokens_per_second,bandwidth_share"
    assert (
        str(row) == f"| 1,024 | 25.0 tok/s | not measured | 50.0 % | [report](../reports/a.json#{fields}) |"
    )


def test_a_series_says_which_of_its_values_is_missing() -> None:
    def cell(*contexts: int) -> str:
        fields = [(f"results[context={context}].tokens_per_second", "tok/s") for context in contexts]
        return str(Row("a.json", REPORT).series(fields, missing="not in time")).split(" | ")[0]

    assert cell(1024, 8192) == "| 25.0 tok/s, not in time"
    assert cell(32, 1024) == "| not in time, 25.0 tok/s"
    assert cell(32, 8192) == "| not in time"


def test_a_unit_that_the_field_does_not_have_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="peak_ms is not in tok/s"):
        Row("a.json", REPORT, "results[0]").number("peak_ms", "tok/s")


def test_a_table_without_rows_is_nothing() -> None:
    assert table(("a", "b"), []) == ""


def test_tables_are_written_between_their_lines() -> None:
    begin, end = "<!-- table decode-gpu: python bench/index.py -->\n", "<!-- end of table -->"
    text = f"# A\n\n{begin}old\n{end}\n\nB\n\n{begin}{end}\nrest\n"
    written = with_tables(text, "docs/a.md", {"decode-h200-x.json": REPORT})
    assert written.count("| x | 1,024 | 25.0 tok/s |") == 2 and "old" not in written
    assert written.startswith("# A\n") and "\n\nB\n" in written and written.endswith(f"{end}\nrest\n")
    assert with_tables(written, "docs/a.md", {"decode-h200-x.json": REPORT}) == written
    assert with_tables("no table\n", "docs/a.md", {}) == "no table\n"


def test_a_table_that_does_not_exist_or_end_is_told() -> None:
    with pytest.raises(SystemExit, match=r"docs/a\.md: the table 'decode' is none of compare, decode-gpu"):
        with_tables("<!-- table decode: python bench/index.py -->\n<!-- end of table -->", "docs/a.md", {})
    with pytest.raises(SystemExit, match="the table 'server-rates' does not end"):
        with_tables("<!-- table server-rates: python bench/index.py -->\n", "docs/a.md", {})


@pytest.mark.parametrize("name", TABLES)
def test_every_number_of_a_generated_table_is_proven(name: str, tmp_path: Path) -> None:
    text = TABLES[name](load_reports(REPORTS))
    assert text.count("\n| ") >= 2
    claims = list(claims_in("docs/performance.md", text))
    assert claims and [claim.complaint() for claim in claims if claim.complaint() is not None] == []


@pytest.mark.parametrize("name", TABLES)
def test_without_reports_a_table_is_empty(name: str) -> None:
    assert TABLES[name]({}) == ""
