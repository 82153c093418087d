"""Writes reports/README.md: every measurement under reports/ with its command, machine, commit, sources and spread.

    python bench/index.py            # writes the page, the planner's points, generated tables, and marks
    python bench/index.py --check    # fails where the page or a citation is not what it should be
    python bench/index.py --same-marks    # after an edit of documents, or a new report of a CPU: compiles nothing

Nothing is measured here: the page only shows what the JSON files beside it hold, and which of them are of earlier code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from claims import documents
from headline import with_headline
from machine_code import compile_ahead
from marks import Marks, judge, marks_on, new_marks, same_marks, with_marks
from monotape.planner.catalogue import DATA
from monotape.planner.reports import built_in_table, load_reports
from references import expanded, gathered
from report import REPORTS, ROOT, kind_of
from stored_table import with_stored
from tables import with_tables

PAGE = REPORTS / "README.md"
MEASURED = DATA / "measured.json"
#: How a report came about; everything else in it is a setting or a result.
ORIGIN = (
    "name", "command", "date", "commit", "uncommitted_changes", "sources", "compiler", "kernels", "machine",
)  # fmt: skip
BYTES = ("weight_bytes", "peak_memory_after_load", "gpu_memory_used")
BANDWIDTHS = ("read_bandwidth", "copy_bandwidth", "bandwidth_of_one_gpu", "bandwidth_of_this_run")
HEAD = """# Reports

What was measured, by which command, on which machine, at which commit. Speeds are medians, with the lowest and the
highest of all runs. A report whose code has changed since is marked as of an earlier kernel, or of earlier sources,
here and wherever a document cites it.

This page is generated from the files beside it: `python bench/index.py`. Its marks were written for these sources (the
first digits of a SHA-256):

| | |
| --- | --- |
"""


def page(reports: dict[str, dict[str, Any]], marks: Marks) -> str:
    sections = [
        HEAD + "".join(f"| sources of the {kind} | {text} |\n" for kind, text in marks.written_for.items())
    ]
    for name, report in reports.items():
        title = f"## [{name.removesuffix('.json')}]({name})"
        sections.append("\n".join([title, "", *_body(report, marks.of[name])]) + "\n")
    if not reports:
        sections.append("Nothing has been measured yet.\n")
    return "\n".join(sections)


def _body(report: dict[str, Any], mark: str) -> Iterator[str]:
    yield "| | |"
    yield "| --- | --- |"
    today = "this kernel" if kind_of(report) == "cuda" else "these sources"
    yield f"| measured code | {mark or today} |"
    yield f"| command | `{report.get('command', 'unknown')}` |"
    machine = report.get("machine", {})
    yield f"| machine | {', '.join(str(value) for value in machine.values()) or 'unknown'} |"
    dirty = " and uncommitted changes" if report.get("uncommitted_changes") else ""
    yield f"| commit | {str(report.get('commit', 'unknown'))[:12]}{dirty} |"
    if "kernels" in report:
        yield f"| compiler | NVRTC {report['compiler']} |"
        for name, kernel in report["kernels"].items():
            yield f"| machine code of {name} | {kernel['machine_code']} |"
    else:
        yield f"| sources | {report.get('sources', 'unknown')} |"
    yield f"| date | {report.get('date', 'unknown')} |"
    settings = {
        key: value
        for key, value in report.items()
        if key not in ORIGIN and value is not None and not isinstance(value, dict | list)
    }
    for key, value in settings.items():
        yield f"| {key.replace('_', ' ')} | {_sized(key, value)} |"
    rows = list(_results(report))
    if rows:
        yield from ("", "| measured | result |", "| --- | --- |", *rows)


def _results(report: dict[str, Any]) -> Iterator[str]:
    """One row for each measurement: entries of lists of results, and named spreads."""
    for key, value in report.items():
        if key in ORIGIN:
            continue
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from (_row(item) for item in value)
        elif isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, dict):
                    shown = _spread(item) if _is_spread(item) else _facts(item)
                    yield f"| {name} | {shown} |"


def _row(item: dict[str, Any]) -> str:
    """A result is named by its first entry: the context, the engine."""
    first, *rest = item
    shown = _shown(item[first])
    name = f"{first.replace('_', ' ')} {shown}" if isinstance(item[first], int | float) else shown
    return f"| {name} | {_facts({key: item[key] for key in rest})} |"


def _facts(item: dict[str, Any]) -> str:
    found = []
    for key, value in item.items():
        if value is None:
            continue
        name = key.replace("_", " ")
        if isinstance(value, dict) and _is_spread(value):
            found.append(f"{name} {_spread(value)}")
        elif (
            isinstance(value, dict)
            and value
            and all(isinstance(one, dict) and _is_spread(one) for one in value.values())
        ):  # by a setting, such as the delay of a link
            found += [f"{name} at {setting} {_spread(one)}" for setting, one in value.items()]
        elif not isinstance(value, dict | list):
            found.append(f"{name} {_shown(value)}")
    return "; ".join(found)


def _is_spread(value: dict[str, Any]) -> bool:
    return {"median", "min", "max", "runs"} <= set(value)


def _spread(value: dict[str, Any]) -> str:
    return (
        f"{_shown(value['median'])} ({_shown(value['min'])} to {_shown(value['max'])}, {value['runs']} runs)"
    )


def _sized(key: str, value: Any) -> str:
    """Bytes and bytes a second in gigabytes."""
    unit = " GB/s" if key in BANDWIDTHS else " GB" if key in BYTES else ""
    return f"{value / 1e9:.3f}{unit}" if unit else _shown(value)


def _shown(value: Any) -> str:
    """Numbers with four digits, the same on every machine."""
    if isinstance(value, list):
        return " and ".join(map(_shown, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def marks_now(reports: dict[str, dict[str, Any]]) -> Marks:
    """With the compiler where code was edited, which takes minutes; its results are kept."""
    compile_ahead(reports.values())
    before, judged = marks_on(_current(PAGE)), judge(reports, compiling=True)
    for name, why in judged.untold.items():
        print(f"Cannot tell whether {name} is of today's kernel: {why}.", file=sys.stderr)
    if unmarked := sorted(set(judged.untold) - set(before.of)):
        compilers = {str(reports[name].get("compiler")) for name in unmarked}
        sys.exit(f"Nothing was written. Install nvidia-cuda-nvrtc=={' or '.join(sorted(compilers))} first.")
    return new_marks(before, judged)


def pages(*, compiling: bool = True) -> dict[Path, str]:
    """What the page of reports and every document should be now."""
    reports = load_reports(REPORTS)
    marks = marks_now(reports) if compiling else same_marks(_current(PAGE), reports)
    found = {PAGE: page(reports, marks), MEASURED: built_in_table(reports)}
    for path in documents():
        text = expanded(path.read_text("utf-8"))
        name = str(path.relative_to(ROOT))
        if name == "README.md":
            text = with_stored(with_headline(text, reports), reports)
        else:
            text = with_tables(text, name, reports)
        found[path] = gathered(with_marks(text, name, marks))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    parser.add_argument(
        "--same-marks",
        action="store_true",
        help="keep the marks of the page as they are: nothing is compiled",
    )
    options = parser.parse_args()
    changed = {
        path: text for path, text in pages(compiling=not options.same_marks).items() if _current(path) != text
    }
    for path, text in changed.items():
        if options.check:
            print(f"{path.relative_to(ROOT)} is out of date: run `python bench/index.py`.")
        else:
            path.write_text(text, "utf-8")
    return 1 if options.check and changed else 0


def _current(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
