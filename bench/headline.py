"""Monotape beside other engines, from the reports of bench/compare.py. Written by bench/index.py.

The README's headline has a row for decoding and one for first tokens; docs/performance.md has a row for every length,
and how many times as fast Monotape is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rows import Report, Row, table

BEGIN, END = "<!-- headline: python bench/index.py -->\n", "<!-- end of headline -->"
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
#: Quantised, with the words for them. vLLM's nearest format is AWQ's for INT4: groups of 128 with zero points.
QUANTISED = {
    "llama-3.1-8b-fp8-channel": "llama-3.1-8b in FP8",
    "llama-3.1-8b-int4-g128": "llama-3.1-8b in INT4 (vLLM: AWQ)",
}
#: Columns of the whole table, and the words above them; a version follows where the engine names one.
ENGINES = {
    "monotape": "Monotape", "vllm": "vLLM", "torch-compile": "`torch.compile`, CUDA graphs",
    "transformers": "`transformers`",
}  # fmt: skip
#: Where the whole step of a shape takes too long to compile, the column has what was compiled layer by layer.
_BY_LAYERS = {"torch-compile": "torch-compile-layer"}
_NOT_IN_TIME = "not in time"  # its report says how long it had
_FAR_APART = 0.1
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
    """A row a shape for decoding, one for first tokens, a column an engine. Empty as long as vLLM was not measured."""
    found = [one for shape in SHAPES for one in _compared(reports, shape) if _measured(one[1], "vllm")]
    if not found:
        return ""
    engines = [
        engine for engine in ENGINES if any(_measured(report, _of(report, engine)) for _, report in found)
    ]
    head = ("", *(ENGINES[engine] + _version(found, engine) for engine in engines))
    quantised = [one for shape in QUANTISED for one in _compared(reports, shape) if _measured(one[1], "vllm")]
    rows = [
        row for name, report in found for row in _headline_rows(name, report, engines, (DECODE, FIRST_TOKEN))
    ]
    rows += [row for name, report in quantised for row in _headline_rows(name, report, engines, (DECODE,))]
    caption = (
        f"One request on one {str(found[0][1]['gpu']).upper()}, bf16 where a row says nothing else, random weights of "
        "the named shapes, all engines of a row in one run, medians:"
    )
    notes = f"{_measured_again(found, reports)}{_by_layers(found)}{_spread(found, engines)}"
    return f"\n{caption}\n{table(head, rows)}{notes}"


def _of(report: Report, engine: str) -> str:
    """The engine of a report that stands in this engine's column."""
    other = _BY_LAYERS.get(engine, engine)
    return other if _measured(report, other) else engine


def _measured_again(found: list[tuple[str, Report]], reports: Mapping[str, Report]) -> str:
    """Decode is measured alone as well, and more often: a reader meets two figures of one shape."""
    again = (
        (report, reports.get(f"decode-{report['gpu']}-{_shape(name)}-{report['dtype']}.json"))
        for name, report in found
    )
    if not any(alone is not None and alone["date"] > beside["date"] for beside, alone in again):
        return ""
    return (
        "Engines are compared within one run only. Monotape's [decode was measured again](docs/performance.md#decode) "
        "later, alone and with a later kernel, so those figures differ from these.\n\n"
    )


def _by_layers(found: list[tuple[str, Report]]) -> str:
    shapes = [_shape(name) for name, report in found if _of(report, "torch-compile") != "torch-compile"]
    if not shapes:
        return ""
    return (
        f"`torch.compile` of {' and '.join(shapes)} compiles a layer, once for all of them: compiling the whole step "
        "takes longer than measuring all engines.\n\n"
    )


def _headline_rows(
    name: str, report: Report, engines: list[str], kinds: tuple[tuple[str, str, str, str, str], ...]
) -> Iterator[Row]:
    shape = _shape(name)
    for key, by, words, field, unit in kinds:
        lengths = [one[by] for one in report[key]]
        row = Row(name, report, folder="reports")
        row.text(f"{QUANTISED.get(shape, shape)}, {words} {' / '.join(f'{length:,}' for length in lengths)}")
        for engine in engines:
            measured = _of(report, engine)
            fields = [(f"{key}[{by}={length}].{field}.{measured}", unit) for length in lengths]
            row.series(fields, missing=_missing(report, measured))
        yield row


def _missing(report: Report, engine: str) -> str:
    """What stands where an engine has no figure."""
    return _NOT_IN_TIME if any(one["engine"] == engine for one in report["engines"]) else ""


def _spread(found: list[tuple[str, Report]], engines: list[str]) -> str:
    """Names the engines whose runs differ by more than a tenth: a median of such runs says less."""
    apart = [
        ENGINES[engine]
        for engine in engines
        if any(
            _differs(one, _of(report, engine))
            for _, report in found
            for one in (*report["decode"], *report["first_token"])
        )
    ]
    if not apart:
        return ""
    return (
        f"Runs of {_listed(apart)} differ by more than a tenth where the host sets their pace; the reports have "
        "each lowest and highest.\n\n"
    )


def _listed(names: list[str]) -> str:
    names = [name.removesuffix(", CUDA graphs") for name in names]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _differs(row: Mapping[str, Any], engine: str) -> bool:
    runs = (row.get("tokens_per_second") or row["first_token_ms"]).get(engine)
    return runs is not None and runs["max"] - runs["min"] > _FAR_APART * runs["median"]


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
        if any(_measured(one, _of(one, engine)) for _, one in found)
        or any(_early(one, engine) for _, one in early)
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
                measured = _of(report, engine)
                values = [(f"{field}.{measured}", unit), (f"monotape_times_as_fast.{measured}", "x")]
                row.numbers(values, missing=_missing(report, measured))
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
