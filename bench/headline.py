"""The README's headline: Monotape beside its peers, from the reports of bench/compare.py. Written by bench/index.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BEGIN, END = "<!-- headline: python bench/index.py -->\n", "<!-- end of headline -->"
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
#: Columns, and the words above them; a version follows where the engine names one.
ENGINES = {
    "monotape": "Monotape", "vllm": "vLLM", "torch-compile": "`torch.compile`, CUDA graphs",
    "transformers": "`transformers`",
}  # fmt: skip


def with_headline(text: str, reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The README with its headline written anew."""
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"README.md has no place for its headline: {BEGIN.strip()} ... {END}")
    return f"{before}{BEGIN}{headline(reports)}{END}{after}"


def headline(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Empty as long as the peers have not been measured."""
    found = [
        (name, report)
        for shape in SHAPES
        for name, report in reports.items()
        if name.startswith("compare-")
        and name.endswith(f"-{shape}.json")
        and "gpu" in report
        and "decode" in report
    ]
    if not found:
        return ""
    gpu = str(found[0][1]["gpu"]).upper()
    engines = [engine for engine in ENGINES if any(_measured(report, engine) for _, report in found)]
    lines = [
        f"One request on one {gpu}, bf16, random weights of the named shapes, all engines in one run, medians:",
        "",
        f"| | {' | '.join(ENGINES[engine] + _version(found, engine) for engine in engines)} | evidence |",
        "| --- |" + " --- |" * (len(engines) + 1),
    ]
    for name, report in found:
        lines += _rows(name, report, engines)
    return "\n".join(["", *lines, "", ""])


def _measured(report: Mapping[str, Any], engine: str) -> bool:
    return any(engine in row.get("tokens_per_second", {}) for row in report["decode"])


def _version(found: list[tuple[str, Mapping[str, Any]]], engine: str) -> str:
    """Of vLLM alone: the others' headings have no room for what they consist of."""
    for _, report in found:
        for row in report["engines"]:
            if row["engine"] == engine == "vllm" and "version" in row:
                return f" {row['version']}"
    return ""


def _rows(name: str, report: Mapping[str, Any], engines: list[str]) -> Iterator[str]:
    shape = next(shape for shape in SHAPES if name.endswith(f"-{shape}.json"))
    for key, length, words, unit in (
        ("decode", "context", "decode at", "tokens_per_second"),
        ("first_token", "prompt", "first token after a prompt of", "first_token_ms"),
    ):
        for row in report[key]:
            measured = [engine for engine in engines if engine in row[unit]]
            cells = [_cell(row[unit].get(engine), unit) for engine in engines]
            fields = f"{key}[{length}={row[length]}].{unit}:{','.join(measured)}"
            link = f"[report](reports/{name}#{fields})"
            yield f"| {shape}, {words} {row[length]:,} | {' | '.join(cells)} | {link} |"


def _cell(spread: Mapping[str, float] | None, unit: str) -> str:
    if spread is None:
        return "failed"
    value = spread["median"]
    if unit == "first_token_ms":
        return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"
    return f"{value:,.0f} tok/s" if value >= 100 else f"{value:.1f} tok/s"
