"""Files as they are stored, from reports of bench/stored.py: the table of docs/performance.md, and the README's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rows import Report, Row, table

BEGIN, END = "<!-- stored: python bench/index.py -->\n", "<!-- end of stored -->"
REFERENCE, STORED = "f32", "as stored"
#: Files by what a reader knows them as.
MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M, Q4_1",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": "Qwen2.5-Coder-0.5B, Q4_K_M",
}
Reports = Mapping[str, Report]


def with_stored(text: str, reports: Reports) -> str:
    """The README with its table of stored formats written anew."""
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"README.md has no place for stored formats: {BEGIN.strip()} ... {END}")
    return f"{before}{BEGIN}{summary(reports)}{END}{after}"


def summary(reports: Reports) -> str:
    """A caption that says which engine is ahead, and a row for each file and way of loading it but the reference."""
    found = _reports(reports)
    if not found:
        return ""
    head = (
        "file", "weights", "bytes a token", "Monotape", "of the ceiling", "llama.cpp", "perplexity",
        "same token as in f32",
    )  # fmt: skip
    rows = (row for name, report in found for row in _summary_rows(name, report))
    return f"\n{_caption(found)}\n{table(head, rows)}{_unpacked(found)}"


def _summary_rows(name: str, report: Report) -> Iterator[Row]:
    for result in report["results"]:
        if result["weights"] == REFERENCE:
            continue
        row = _row(name, report, result, "reports")
        row.number("bytes_per_token", "MB").number("tokens_per_second", "tok/s").number(
            "bandwidth_share", "%"
        )
        row.number("llamacpp_tokens_per_second", "tok/s")
        yield _agreement(row, result)


def stored_cpu(reports: Reports) -> str:
    """All that was measured: formats of the stages, the ceiling, and how far the distributions are apart."""

    def rows() -> Iterator[Row]:
        for name, report in _reports(reports):
            for result in report["results"]:
                row = _row(name, report, result, "../reports").text(result["formats"])
                row.number("bytes_per_token", "MB").number("tokens_per_second", "tok/s")
                row.number("ceiling_tokens_per_second", "tok/s").number("bandwidth_share", "%")
                row.numbers([("llamacpp_tokens_per_second", "tok/s"), ("monotape_times_as_fast", "x")])
                yield _agreement(row, result, divergence=True)

    head = (
        "file", "weights", "in memory", "bytes a token", "Monotape", "ceiling", "share", "llama.cpp", "perplexity",
        "same token as in f32", "divergence",
    )  # fmt: skip
    return table(head, rows())


def _reports(reports: Reports) -> list[tuple[str, Report]]:
    return [one for one in reports.items() if one[0].startswith("stored-cpu-")]


def _row(name: str, report: Report, result: Mapping[str, Any], folder: str) -> Row:
    """A link has no room for spaces and commas."""
    weights = result["weights"].replace(", ", "*").replace(" ", "*")
    row = Row(name, report, f"results[model={result['model']}&weights={weights}]", folder)
    return row.text(MODELS.get(result["model"], result["model"])).text(result["weights"])


def _agreement(row: Row, result: Mapping[str, Any], *, divergence: bool = False) -> Row:
    """The last cells. Of the reference there is nothing to compare."""
    row.text(f"{result['perplexity']:.2f}")
    reference = result["weights"] == REFERENCE
    row.text("") if reference else row.number("same_token_share", "%")
    return row.text("" if reference else f"{result['divergence_nats']:.1e}") if divergence else row


def _caption(found: list[tuple[str, Report]]) -> str:
    machines = " and ".join(_machine(report) for _, report in found)
    said = [f"Real files on {machines}, one request, medians; perplexity and tokens on one fixed text."]
    ahead = [one for _, report in found if (one := _ahead(report))]
    if ahead:
        said += ["llama.cpp is compiled for this CPU and ran in the same run.", *ahead]
    return " ".join(said)


def _unpacked(found: list[tuple[str, Report]]) -> str:
    """Of rows that no command of a user gives: bench/stored.py rounds a file as if it stored floats."""
    rows = [result["weights"] for _, report in found for result in report["results"]]
    if not any(weights.startswith("int4") for weights in rows):
        return ""
    return (
        "The rows with int4 round the unpacked file: `--dtype int4` takes a 16-bit checkpoint, and refuses a file that "
        "is rounded already.\n\n"
    )


def _machine(report: Report) -> str:
    return f"{report['workers']} cores of {report['machine']['processor']}"


def _ahead(report: Report) -> str:
    """Which engine is faster, file by file."""
    engines: dict[str, list[str]] = {}
    for result in report["results"]:
        if (times := result.get("monotape_times_as_fast")) is not None:
            name = MODELS.get(result["model"], result["model"]).partition(",")[0]
            engines.setdefault("Monotape" if times > 1 else "llama.cpp", []).append(name)
    return " ".join(f"{engine} is ahead with {' and '.join(names)}." for engine, names in engines.items())
