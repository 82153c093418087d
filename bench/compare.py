"""Decode speed and time to the first token beside other engines: the same shapes, the same GPU, one run.

    python bench/compare.py --shapes llama-3.2-1b,llama-3.1-8b --save
    python bench/compare.py --shapes llama-3.1-8b --engines vllm --save --merge    # into the report of this machine

Weights are random everywhere; every engine answers one greedy request at a time, in bf16. Peers run in processes of
their own; what one measured before it failed is kept, with its error. With --merge what is measured now joins the
report that is there, if it was begun since this machine started: engines need not all fit one call.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import prefill
from measuring import integers, kernel_facts, load_model, prompt_of, read_bandwidth, run_request
from peer_task import Answer, Stopwatch, Task, ask
from peer_vllm import QUANTISED
from report import REPORTS, command_line, publish, spread
from shapes import SHAPES

OWN = "monotape"
PEERS = (
    "vllm", "torch-compile", "torch-compile-layer", "torch-compile-sdpa", "torch-eager", "transformers",
    "transformers-static",
)  # fmt: skip
DEFAULT = (OWN, "vllm", "torch-compile", "transformers")


def names(text: str) -> list[str]:
    return text.split(",")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=names, default=["llama-3.2-1b"], help=", ".join(SHAPES))
    parser.add_argument("--engines", type=names, default=list(DEFAULT), help=", ".join((OWN, *PEERS)))
    parser.add_argument("--backend", default="cuda", choices=["cpu", "cuda"], help="cpu is for trying it out")
    parser.add_argument("--contexts", type=integers, default=[32, 1024, 8192], help="of decoding")
    parser.add_argument("--prompts", type=integers, default=[64, 1024, 8192], help="before a first token")
    parser.add_argument("--tokens", type=int, default=256, help="decoded in a request")
    parser.add_argument("--requests", type=int, default=5, help="of which the median counts")
    parser.add_argument("--timeout", type=float, default=540, help="seconds of one peer with one shape")
    parser.add_argument("--stored", choices=sorted(QUANTISED), help="how layers are stored; the head is bf16")
    parser.add_argument("--merge", action="store_true", help="add to the report that is there")
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    options = parser.parse_args()
    unknown = (set(options.shapes) - set(SHAPES)) | (set(options.engines) - {OWN, *PEERS})
    if unknown:
        sys.exit(f"Unknown: {', '.join(sorted(unknown))}. See --help.")
    if options.stored and set(options.engines) - {OWN, "vllm"}:
        sys.exit("--stored is for --engines monotape,vllm: the others have no such weights.")
    return options


def own_answer(options: argparse.Namespace, task: Task) -> tuple[Answer, dict[str, Any]]:
    """Monotape's own times, and the facts of the report that only it can tell."""
    watch, answer = Stopwatch(), Answer(settings="one launch a request")
    settings = argparse.Namespace(
        model=task.shape,
        backend=options.backend,
        dtype=None,
        workers=None,
        stored=task.stored,
        stored_head=None,
    )
    backend, _ = load_model(settings, task.most_positions)
    answer.start_s = watch.seconds()
    bandwidth = read_bandwidth(backend)
    facts = {**kernel_facts(backend, task.shape, None), "read_bandwidth": bandwidth}
    for length in task.prompts:
        prompt = prompt_of(length, backend.spec.vocab)
        answer.first_token_s[length] = prefill.measure(
            backend, backend.new_sequence(), prompt, 0, task.requests
        )
    for context in task.contexts:
        sequence, prompt = backend.new_sequence(), prompt_of(context, backend.spec.vocab)
        run_request(backend, sequence, prompt, 0, task.tokens)
        answer.tokens_per_second[context] = [
            run_request(backend, sequence, prompt, context - 1, task.tokens).tokens_per_second
            for _ in range(task.requests)
        ]
    read = {context: backend.plan.token_bytes(context + task.tokens // 2) for context in task.contexts}
    facts["ceilings"] = {context: bandwidth / count for context, count in read.items()}
    backend.close()
    return answer, facts


def available(engine: str) -> bool:
    module = {"vllm": "vllm", "transformers": "transformers"}.get(engine.partition("-static")[0], "torch")
    return engine == OWN or find_spec(module) is not None


def lease(gpu: str) -> str:
    """Names this machine since it was started: what is compared was measured there, one after another."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return hashlib.sha256(f"{boot.read_text() if boot.exists() else ''}{gpu}".encode()).hexdigest()[:12]


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    if options.backend != "cuda":
        return {"lease": lease("")}
    from measuring import short_name
    from monotape.backends.cuda.driver import device, device_name

    return {"gpu": short_name(device_name()), "lease": lease(str(device().uuid))}


def engine_row(engine: str, answer: Answer, seconds: float) -> dict[str, Any]:
    found = {
        "engine": engine, "version": answer.version, "settings": answer.settings, "start_s": answer.start_s,
        "measured_in_s": seconds, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(), "error": answer.error,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value not in ("", None)}


def add(report: dict[str, Any], engine: str, answer: Answer, row: dict[str, Any]) -> None:
    """An engine's answer, in place of an earlier one of the same engine."""
    report["engines"] = [one for one in report.get("engines", []) if one["engine"] != engine] + [row]
    milliseconds = {length: [1e3 * run for run in runs] for length, runs in answer.first_token_s.items()}
    for name, key, unit, runs_by_length in (
        ("decode", "context", "tokens_per_second", answer.tokens_per_second),
        ("first_token", "prompt", "first_token_ms", milliseconds),
    ):
        rows = report.setdefault(name, [])
        for one in rows:
            one[unit].pop(engine, None)
        for length, runs in runs_by_length.items():
            _row(rows, key, length).setdefault(unit, {})[engine] = spread(runs)
        rows.sort(key=lambda one: int(one[key]))


def _row(rows: list[dict[str, Any]], key: str, length: int) -> dict[str, Any]:
    for one in rows:
        if one[key] == length:
            return one
    rows.append({key: length})
    return rows[-1]


def add_ratios(report: dict[str, Any]) -> None:
    """How many times as fast as each peer Monotape is."""
    for name, unit, faster in (("decode", "tokens_per_second", 1), ("first_token", "first_token_ms", -1)):
        for row in report.get(name, []):
            own = row.get(unit, {}).get(OWN)
            if own is not None:
                row["monotape_times_as_fast"] = {
                    engine: (own["median"] / found["median"]) ** faster
                    for engine, found in row[unit].items()
                    if engine != OWN
                }


def begun(options: argparse.Namespace, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The report to add to: an empty one, or that of this machine and task which is there."""
    path = REPORTS / f"{name}.json"
    if not options.merge:
        return {}
    if not path.is_file():
        sys.exit(f"There is no reports/{path.name} to add to. Leave out --merge the first time.")
    report: dict[str, Any] = json.loads(path.read_text())
    for key, wanted in {**facts, "tokens": options.tokens}.items():
        if report.get(key) != wanted:
            sys.exit(
                f"reports/{path.name} has {report.get(key)!r} as its {key}, not {wanted!r}. Measure it all anew."
            )
    kept = ("gpu", "lease", "compiler", "kernels", "backend", "dtype", "tokens", "read_bandwidth", "engines", "decode",
            "first_token")  # fmt: skip
    return {key: report[key] for key in kept if key in report}


def compare(options: argparse.Namespace, shape: str) -> None:
    """All engines with one shape, and their report, which is written after each of them."""
    facts = machine_facts(options)
    words = [
        "compare",
        str(facts.get("gpu", options.backend)),
        shape,
        *([options.stored] if options.stored else []),
    ]
    name = "-".join(words).lower()
    report = {**begun(options, name, facts), **facts}
    report |= {"backend": options.backend, "dtype": options.stored or "bf16", "tokens": options.tokens}
    if "gpu" in report and "kernels" not in report and options.engines[0] != OWN:
        sys.exit(
            "A report of a GPU begins with its kernels: measure monotape first, the others with --merge."
        )
    lengths = tuple(options.contexts), tuple(options.prompts)
    task = Task(shape, *lengths, options.tokens, options.requests, options.backend, options.stored)
    for engine in options.engines:
        watch = Stopwatch()
        answer, own = own_answer(options, task) if engine == OWN else (peer_answer(engine, task, options), {})
        ceilings = own.pop("ceilings", {})
        report |= own
        add(report, engine, answer, engine_row(engine, answer, watch.seconds()))
        for row in report["decode"]:
            if row["context"] in ceilings:
                row["ceiling_tokens_per_second"] = ceilings[row["context"]]
        add_ratios(report)
        print_engine(report, engine)
        publish(name, report, save=options.save)


def peer_answer(engine: str, task: Task, options: argparse.Namespace) -> Answer:
    return ask(engine, task, options.timeout) if available(engine) else Answer(error="not installed here")


def print_engine(report: Mapping[str, Any], engine: str) -> None:
    (row,) = [one for one in report["engines"] if one["engine"] == engine]
    print(
        f"{report.get('gpu', 'cpu')}: {engine} {row.get('version', '')} {row.get('error', '')}".rstrip(),
        flush=True,
    )
    for name, key, unit in (
        ("decode", "context", "tokens_per_second"),
        ("first_token", "prompt", "first_token_ms"),
    ):
        for one in report[name]:
            if engine in one.get(unit, {}):
                ratio = one.get("monotape_times_as_fast", {}).get(engine)
                told = f"  monotape is {ratio:.2f}x" if ratio else ""
                value = one[unit][engine]["median"]
                print(f"  {key} {one[key]:>6,} {value:>10,.2f} {unit.replace('_', ' ')}{told}", flush=True)


def main() -> None:
    options = parse_arguments()
    for shape in options.shapes:  # each has a report of its own: a peer may take minutes to compile the next
        compare(options, shape)


if __name__ == "__main__":
    main()
