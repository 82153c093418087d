"""Tables of docs/ that are made from reports. Written by bench/index.py, between these two lines of a document:

    <!-- table decode-gpu: python bench/index.py -->
    <!-- end of table -->

A name without a builder in TABLES is an error, and so is a table that does not end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headline import comparison
from lane_table import in_document as lanes
from rows import Report, Row, table
from shapes import config_json
from stored_table import stored_cpu

Reports = Mapping[str, Report]
_BEGIN = re.compile(r"<!-- table ([\w-]+): python bench/index\.py -->\n")
_END = "<!-- end of table -->"
#: A round shape with as many layers and about as many bytes as the odd one beside it.
ROUND = {"smollm2-135m": "round-135m", "qwen2.5-0.5b": "round-0.5b", "qwen2.5-1.5b": "round-1.5b"}


def with_tables(text: str, document: str, reports: Reports) -> str:
    """The document with all of its tables written anew."""
    parts, position = [], 0
    while (begin := _BEGIN.search(text, position)) is not None:
        end = text.find(_END, begin.end())
        if end < 0 or begin[1] not in TABLES:
            why = "does not end" if end < 0 else f"is none of {', '.join(TABLES)}"
            raise SystemExit(f"{document}: the table {begin[1]!r} {why}.")
        parts += [text[position : begin.end()], TABLES[begin[1]](reports)]
        position = end
    return "".join(parts) + text[position:]


def _named(reports: Reports, prefix: str, *, gpu: bool) -> list[tuple[str, Report]]:
    """Reports of one kind, smallest model first."""
    found = [one for one in reports.items() if one[0].startswith(prefix) and ("gpu" in one[1]) == gpu]
    return sorted(found, key=lambda one: (one[1].get("weight_bytes", 0), one[0]))


def _codes(report: Report) -> bool:
    """Whether some weights, or keys and values, are stored quantised."""
    kept = (*report.get("formats", {}).values(), report.get("kv", "bf16"))  # older ones kept 16 bits
    return any(fmt not in ("bf16", "f16", "f32") for fmt in kept)


def decode_gpu(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "decode-", gpu=True):
            if report["model"] not in ROUND.values() and not _codes(report):
                for result in report["results"]:
                    yield _decode_row(Row(name, report, f"results[context={result['context']}]"), result)

    head = (
        "shape", "context", "Monotape", "ceiling", "share", "p99 / median gap", "sampled / greedy", "energy",
    )  # fmt: skip
    return table(head, rows())


def _decode_row(row: Row, result: Mapping[str, Any]) -> Row:
    row.text(row.report["model"]).text(result["context"])
    row.number("tokens_per_second", "tok/s").number("ceiling_tokens_per_second", "tok/s")
    row.number("bandwidth_share", "%").number("p99_over_p50", "x").number("sampled_over_greedy", "%")
    return row.number("joules_per_token", "J/token")


def formats_gpu(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "decode-", gpu=True):
            for result in report["results"] if _codes(report) else ():
                layers, head = report["formats"]["down"], report["formats"]["head"]
                row = Row(name, report, f"results[context={result['context']}]").text(report["model"])
                row.text(layers).text(head).text(report.get("kv", "16 bits")).text(result["context"]).number(
                    "bytes_per_token", "MB"
                )
                row.number("tokens_per_second", "tok/s").number("ceiling_tokens_per_second", "tok/s")
                yield row.number("bandwidth_share", "%").number("joules_per_token", "J/token")

    head = (
        "shape", "layers", "head", "KV", "context", "bytes a token", "Monotape", "ceiling", "share", "energy",
    )  # fmt: skip
    return table(head, rows())


def decode_cpu(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "decode-", gpu=False):
            for result in report["results"]:
                row = Row(name, report, f"results[context={result['context']}]")
                row.text(f"Monotape, {report['dtype']}").text(result["context"])
                row.number("tokens_per_second", "tok/s").number("ceiling_tokens_per_second", "tok/s")
                yield row.number("bandwidth_share", "%").number("p99_over_p50", "x")
            for peer in report["peers"]:  # at the first context; a link has no room for spaces and commas
                field = f"peers[{peer.replace(', ', '*').replace(' ', '*')}]"
                row = Row(name, report).text(peer).text(report["results"][0]["context"])
                yield row.number(field, "tok/s").text("").text("").text("")

    return table(("engine", "context", "speed", "ceiling", "share", "p99 / median gap"), rows())


def _prefill(reports: Reports, *, gpu: bool) -> str:
    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "prefill-", gpu=gpu):
            for result in report["prefill"]:
                row = Row(name, report, f"prefill[prompt={result['prompt']}]").text(_short(report["model"]))
                row.text(result["prompt"] - result["cached"]).text(result["cached"])
                row.number("first_token_ms", "ms").number("new_tokens_per_second", "tok/s")
                yield row.number("ceiling_ms", "ms").number("share", "%") if gpu else row

    ceiling = ("ceiling", "share") if gpu else ()
    return table(("model", "new tokens", "cached", "first token after", "prompt speed", *ceiling), rows())


def _short(model: str) -> str:
    return model.removesuffix(".gguf")


def startup(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "startup-", gpu=True):
            model = report["model"]
            yield (
                Row(name, report).text(f"{model}, first token of a new process").number("first_token_s", "s")
            )
            yield (
                Row(name, report)
                .text(f"{model}, the same where the kernel must be compiled first")
                .number("cold_first_token_s", "s")
            )
            for one in report["phases"]:
                row = Row(name, report, f"phases[phase={one['phase']}]".replace(" ", "*"))
                yield row.text(f"of it: {one['phase']}").number("seconds", "ms")

    return table(("", "time"), rows())


def odd_widths(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "decode-", gpu=True):
            other = _decode_report(reports, ROUND.get(report["model"], ""))
            if other is not None and not _codes(report):
                yield _speed_at_32(name, report)
                yield _speed_at_32(*other)

    return table(("shape", "width", "FFN", "heads", "KV heads", "Monotape", "share"), rows())


def _decode_report(reports: Reports, model: str) -> tuple[str, Report] | None:
    named = _named(reports, "decode-", gpu=True)
    found = (one for one in named if one[1]["model"] == model and not _codes(one[1]))
    return next(found, None)


def _speed_at_32(name: str, report: Report) -> Row:
    shape = config_json(report["model"])
    row = Row(name, report, "results[context=32]").text(report["model"])
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        row.text(shape[key])
    return row.number("tokens_per_second", "tok/s").number("bandwidth_share", "%")


def collective(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "collective-", gpu=True):
            for one in report["results"]:
                size = one.get("kilobytes")
                chosen = f"&kilobytes={size}" if size is not None else ""
                row = Row(name, report, f"results[what={one['what']}&ranks={one['ranks']}{chosen}]")
                row.text(one["what"]).text(one["ranks"]).text(f"{size} KB" if chosen else "")
                yield row.number("p50_us", "us").number("p99_us", "us")

    return table(("operation", "ranks", "size", "median", "p99"), rows())


def scaling(reports: Reports) -> str:
    """Tokens per second of one rank of the most, by the delay of a word in microseconds."""
    names = {"tp": "plain tensor parallelism", "dtp": "a delay of one layer", "silent": "no communication"}

    def rows() -> Iterator[Row]:
        for name, report in _named(reports, "scaling-", gpu=True):
            for one in report["results"]:
                if one["ranks"] == max(other["ranks"] for other in report["results"]):
                    place = f"model={one['model']}&ranks={one['ranks']}&setting={one['setting']}"
                    row = Row(name, report, f"results[{place}].tokens_per_second")
                    row.text(one["model"]).text(one["ranks"]).text(names[one["setting"]])
                    yield row.number("0", "tok/s").number("2", "tok/s")

    return table(("model", "ranks", "setting", "no delay", "words 2 microseconds late"), rows())


def humaneval(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        for name, report in reports.items():
            for place, run in enumerate(report.get("runs", []) if name.startswith("humaneval-") else []):
                row = Row(name, report, f"runs[{place}]").text(run["engine"])
                row.text(report["machine"]["processor"] if "gpu" not in report else report["gpu"].upper())
                row.text(f"{run['passed']} of {run['total']}").text(_same_tokens(report, run["engine"]))
                yield row.number("seconds", "s").number("tokens_per_second", "tok/s")

    return table(("engine", "machine", "passed", "same tokens as `transformers`", "time", "speed"), rows())


def _same_tokens(report: Report, engine: str) -> str:
    """In how many problems an engine wrote what `transformers` wrote in the same run."""
    for one in report["differences"]:
        if one["engines"][0] == engine and one["engines"][1].startswith("transformers"):
            return f"{one['same_tokens']} of {report['problems']}"
    return ""


def server_rates(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        name = "serve-rates.json"
        for one in reports.get(name, {}).get("results", []):
            row = Row(name, reports[name], f"results[rate={one['rate']}]").text(
                f"{one['rate']:,.0f} per second"
            )
            row.number("share_of_rate", "%").number("cpu_share_streaming.server", "%")
            yield row.number("cpu_share_idle.server", "%")

    client = "the unmodified `openai` client receives"
    return table(("engine's tokens", client, "core of the server, streaming", "idle"), rows())


def server_leave(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        name = "serve-leave.json"
        for one in reports.get(name, {}).get("clients", []):
            place = f"clients[streaming={one['streaming']}&share_of_tokens={one['share_of_tokens']}]"
            moment = {0: "before its first token", 0.5: "halfway"}.get(
                one["share_of_tokens"], "after a few tokens"
            )
            row = Row(name, reports[name], place).text("streaming" if one["streaming"] else "not streaming")
            yield row.text(moment).number("idle_after_ms", "ms").number("idle_after_ms.max", "ms")

    return table(("client", "leaves", "engine idle after, median", "at most"), rows())


def server_share(reports: Reports) -> str:
    def rows() -> Iterator[Row]:
        name = "serve-share.json"
        if name not in reports:
            return
        for what, field in (
            ("the server, next turn of a conversation", "next_turn_ms"),
            ("· of it: the chat template", "next_turn_render_ms"),
            ("· of it: the tokenizer", "next_turn_tokenize_ms"),
            ("the server, a new conversation", "new_conversation_ms"),
            ("the engine learns that a client has left", "cancelled_after_ms"),
        ):
            yield Row(name, reports[name], "").text(what).number(field, "ms").number(f"{field}.max", "ms")
        for what, field in (
            ("Python API, next turn", "engine_next_turn_ms"),
            ("Python API, ids", "engine_cached_prompt_ms"),
        ):
            for tokens in reports[name][field]:
                row = Row(name, reports[name], "").text(f"{what}, {int(tokens):,} cached tokens")
                yield row.number(f"{field}.{tokens}", "ms").number(f"{field}.{tokens}.max", "ms")

    return table(("from the last byte, or the call, to the start of the job", "median", "at most"), rows())


TABLES: Mapping[str, Callable[[Reports], str]] = {
    "compare": lambda reports: comparison(reports, folder="../reports"),
    "decode-gpu": decode_gpu,
    "formats-gpu": formats_gpu,
    "prefill-gpu": lambda reports: _prefill(reports, gpu=True),
    "startup": startup,
    "odd-widths": odd_widths,
    "collective": collective,
    "scaling": scaling,
    "lanes": lanes,
    "decode-cpu": decode_cpu,
    "stored-cpu": stored_cpu,
    "prefill-cpu": lambda reports: _prefill(reports, gpu=False),
    "humaneval": humaneval,
    "server-rates": server_rates,
    "server-leave": server_leave,
    "server-share": server_share,
}
