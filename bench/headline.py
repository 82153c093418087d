"""Monotape beside other engines, from the reports of bench/compare.py. Written by bench/index.py.

The README's headline is vLLM alone, at lengths where both decoding and the first token were measured;
docs/performance.md has every engine and length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rows import Report, Row, table

BEGIN, END = "<!-- headline: python bench/index.py -->\n", "<!-- end of headline -->"
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
#: Columns of the whole table, and the words above them; a version follows where the engine names one.
ENGINES = {
    "monotape": "Monotape", "vllm": "vLLM", "torch-compile": "`torch.compile`, CUDA graphs",
    "transformers": "`transformers`",
}  # fmt: skip
DECODE = ("decode", "context", "decode at", "tokens_per_second", "tok/s")
FIRST_TOKEN = ("first_token", "prompt", "first token after a prompt of", "first_token_ms", "ms")


def with_headline(text: str, reports: Mapping[str, Report]) -> str:
    """The README with its headline written anew."""
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"README.md has no place for its headline: {BEGIN.strip()} ... {END}")
    return f"{before}{BEGIN}{headline(reports)}{END}{after}"


def headline(reports: Mapping[str, Report]) -> str:
    """Empty as long as vLLM has not been measured."""
    found = [one for shape in SHAPES for one in _compared(reports, shape) if _measured(one[1], "vllm")]
    if not found:
        return ""
    gpu, vllm = str(found[0][1]["gpu"]).upper(), f"vLLM{_version(found, 'vllm')}"
    head = (
        "context",
        "Monotape decodes",
        f"{vllm} decodes",
        "Monotape's first token",
        f"{vllm}'s first token",
    )
    rows = table(head, [row for name, report in found for row in _headline_rows(name, report)])
    caption = f"One request on one {gpu}, bf16, random weights of the named shapes, both engines in one run, medians:"
    return f"\n{caption}\n{rows}" if rows else ""


def _headline_rows(name: str, report: Report) -> Iterator[Row]:
    lengths = {row["prompt"] for row in report["first_token"]}
    for length in (row["context"] for row in report["decode"] if row["context"] in lengths):
        row = Row(name, report, folder="reports").text(f"{_shape(name)}, {length:,}")
        for key, by, _, field, unit in (DECODE, FIRST_TOKEN):
            for engine in ("monotape", "vllm"):
                row.number(f"{key}[{by}={length}].{field}.{engine}", unit, missing="failed")
        yield row


def comparison(reports: Mapping[str, Report], folder: str) -> str:
    """Every engine, shape and length that was compared, and how many times as fast Monotape is."""
    shapes = sorted({_shape(name) for name in reports if name.startswith("compare-")})
    found = [one for shape in shapes for one in _compared(reports, shape)]
    early = [
        (name, one) for name, one in reports.items() if name.startswith("compare-") and "decode" not in one
    ]
    engines = [
        engine
        for engine in ENGINES
        if any(_measured(one, engine) for _, one in found) or any(_early(one, engine) for _, one in early)
    ]
    rows = [row for name, one in found for row in _rows(name, one, engines, folder)]
    rows += [_early_row(name, one, engines, folder) for name, one in early]
    return table(("", *(ENGINES[engine] + _version(found, engine) for engine in engines)), rows)


def _shape(name: str) -> str:
    """compare-h200-llama-3.2-1b.json -> llama-3.2-1b"""
    return name.removesuffix(".json").split("-", 2)[-1]


def _compared(reports: Mapping[str, Report], shape: str) -> list[tuple[str, Report]]:
    return [
        (name, report)
        for name, report in reports.items()
        if name.startswith("compare-") and _shape(name) == shape and "gpu" in report and "decode" in report
    ]


def _measured(report: Report, engine: str) -> bool:
    return any(engine in row.get("tokens_per_second", {}) for row in report["decode"])


def _version(found: list[tuple[str, Report]], engine: str) -> str:
    """The version of vLLM; the other engines consist of several packages, for which a heading has no room."""
    for _, report in found:
        for row in report["engines"]:
            if row["engine"] == engine == "vllm" and "version" in row:
                return f" {row['version']}"
    return ""


def _rows(name: str, report: Report, engines: list[str], folder: str) -> Iterator[Row]:
    for key, by, words, field, unit in (DECODE, FIRST_TOKEN):
        for one in report[key]:
            row = Row(name, report, f"{key}[{by}={one[by]}]", folder)
            row.text(f"{_shape(name)}, {words} {one[by]:,}")
            for engine in engines:
                times = [(f"monotape_times_as_fast.{engine}", "x")]
                row.numbers([(f"{field}.{engine}", unit), *times], missing="failed")
            yield row


def _early(report: Report, engine: str) -> Any:
    """An engine of a report that has one context alone, as bench/compare.py wrote them once."""
    return next((one for one in report["engines"] if one["engine"].startswith(f"{engine},")), None)


def _early_row(name: str, report: Report, engines: list[str], folder: str) -> Row:
    row = Row(name, report, folder=folder).text(f"{_shape(name)}, decode at {report['context']:,}")
    for engine in engines:
        place = f"engines[engine={engine}*]"
        row.numbers([(f"{place}.tokens_per_second", "tok/s"), (f"{place}.monotape_over_it", "x")])
    return row
