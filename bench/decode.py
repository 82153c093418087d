"""Decode speed of one request against the physical ceiling: bytes a token must read / measured read bandwidth.

    python bench/decode.py --backend cpu --model PATH --compare llamacpp --save
    python bench/decode.py --backend cuda --model llama-3.2-1b --contexts 32,1024,8192 --tokens 256 --sampled --save

MODEL is a path or hub id, or a named shape with random weights (see bench/shapes.py). A context of N is reached by a
prompt of N ids. The read bandwidth is measured in the same run, before and after; the better of the two is the ceiling.
Energy is counted over greedy requests of their own, repeated for two seconds (bench/energy.py).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energy import Energy, EnergyCounter, NoCounter, energy_of, open_counter
from llamacpp import decode_speeds, q8_0_decode_speeds
from measuring import (
    SAMPLED,
    Timed,
    add_model_arguments,
    gpu_facts,
    integers,
    kernel_facts,
    launches,
    load_model,
    p99_over_p50,
    prompt_of,
    read_bandwidth,
    run_request,
)
from monotape.backends.protocol import Backend, Sampling
from report import publish, spread

QWEN_CODER = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Decode speed at one context: one figure a request, and the time between tokens over all of them."""

    context: int
    speeds: list[float]
    gaps_s: list[float]
    bytes_per_token: int
    launches_per_request: float | None
    energy: Energy


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser, QWEN_CODER)
    parser.add_argument("--contexts", type=integers, default=[32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument(
        "--sampled", action="store_true", help="measure sampled decoding too, as a share of greedy"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record four tokens at the first context: a trace and a table",
    )
    parser.add_argument("--compare", choices=["llamacpp"], help="run a peer on the same file in the same run")
    return parser.parse_args()


def measure(
    backend: Backend, counter: EnergyCounter | NoCounter, context: int, tokens: int, requests: int,
    sampling: Sampling | None = None,
) -> Measurement:  # fmt: skip
    speeds, gaps = [], []
    prompt = prompt_of(context, backend.spec.vocab)
    sequence = backend.new_sequence()
    run_request(
        backend, sequence, prompt, 0, tokens, sampling
    )  # warms up, and fills the KV that the others reuse
    before = launches(backend)

    def request() -> Timed:
        return run_request(backend, sequence, prompt, context - 1, tokens, sampling)

    for _ in range(requests):
        timed = request()
        speeds.append(timed.tokens_per_second)
        gaps += timed.gaps_s
    after = launches(backend)
    counted = None if after is None or before is None else (after - before) / requests
    energy = energy_of(counter, lambda: len(request().times_ns))
    return Measurement(
        context, speeds, gaps, backend.plan.token_bytes(context + tokens // 2), counted, energy
    )


def peak_memory_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def row(measurement: Measurement, bandwidth: float, sampled: Measurement | None) -> dict[str, Any]:
    speed = statistics.median(measurement.speeds)
    found: dict[str, Any] = {
        "context": measurement.context,
        "tokens_per_second": spread(measurement.speeds),
        "bytes_per_token": measurement.bytes_per_token,
        "ceiling_tokens_per_second": bandwidth / measurement.bytes_per_token,
        "bandwidth_share": speed * measurement.bytes_per_token / bandwidth,
        "p99_over_p50": p99_over_p50(measurement.gaps_s),
        "joules_per_token": measurement.energy.joules_per_token,
    }
    if measurement.energy.missing:
        found["joules_missing"] = measurement.energy.missing
    if measurement.launches_per_request is not None:
        found["launches_per_request"] = measurement.launches_per_request
    if sampled is not None:
        found["sampled_tokens_per_second"] = spread(sampled.speeds)
        found["sampled_over_greedy"] = statistics.median(sampled.speeds) / speed
    return found


def peers(options: argparse.Namespace, path: Path | None, vocab: int) -> dict[str, Any]:
    if options.compare is None:
        return {}
    if path is None or path.suffix != ".gguf":
        sys.exit("--compare llamacpp needs a GGUF file as --model.")
    from monotape.backends.cpu.bandwidth import available_cpus

    prompt = prompt_of(options.contexts[0], vocab)
    arguments = (path, prompt, options.tokens, options.requests, options.workers or available_cpus())
    return {
        "llama.cpp, Q8_0 copy of the file": spread(q8_0_decode_speeds(*arguments)),
        "llama.cpp, the file as it is": spread(decode_speeds(*arguments)),
    }


def print_table(rows: Sequence[dict[str, Any]], others: dict[str, Any], bandwidth: float) -> None:
    print(f"read bandwidth {bandwidth / 1e9:.2f} GB/s")
    print(f"{'context':>8} {'ceiling':>9} {'tok/s':>8} {'min':>7} {'max':>7} {'share':>6} {'p99/p50':>8}")
    for r in rows:
        speed = r["tokens_per_second"]
        print(
            f"{r['context']:>8} {r['ceiling_tokens_per_second']:>9.1f} {speed['median']:>8.1f} {speed['min']:>7.1f}"
            f" {speed['max']:>7.1f} {100 * r['bandwidth_share']:>5.1f}% {r['p99_over_p50']:>8.3f}"
        )
        if r["joules_per_token"] is not None:
            print(f"{'':>8} {1e3 * r['joules_per_token']:.1f} millijoules a token")
        if "sampled_over_greedy" in r:
            print(f"{'':>8} sampled: {100 * r['sampled_over_greedy']:.1f}% of greedy")
    for name, speed in others.items():
        print(f"{name}: {speed['median']:.1f} tok/s ({speed['min']:.1f} to {speed['max']:.1f})")


def trace(backend: Backend, context: int, bandwidth: float, path: Path) -> None:
    from monotape.backends.cuda.trace import Traced, table, write_chrome

    if not isinstance(backend, Traced):
        sys.exit(f"The {backend.name} backend cannot be traced.")
    recorded = backend.trace(prompt_of(context, backend.spec.vocab), 4)
    with path.open("w") as file:
        write_chrome(recorded, file)
    print(table(recorded, bandwidth))


def main() -> None:
    options = parse_arguments()
    backend, path = load_model(options, max(options.contexts) + options.tokens)
    load_peak, facts = peak_memory_bytes(), gpu_facts(backend)
    before = read_bandwidth(backend)
    counter, without = open_counter(backend.name), NoCounter("counted for greedy requests alone")
    arguments = options.tokens, options.requests
    measured = [measure(backend, counter, context, *arguments) for context in options.contexts]
    sampled = [
        measure(backend, without, context, *arguments, SAMPLED)
        for context in options.contexts
        if options.sampled
    ]
    bandwidth = max(before, read_bandwidth(backend))
    rows = [
        row(found, bandwidth, sampled[index] if sampled else None) for index, found in enumerate(measured)
    ]
    vocab, plan = backend.spec.vocab, backend.plan
    if options.trace:
        trace(backend, options.contexts[0], bandwidth, options.trace)
    backend.close()
    others = peers(options, path, vocab)
    print_table(rows, others, bandwidth)
    machine = facts.get("gpu", options.backend)
    formats = sorted({stage.format.value for stage in plan.ranks[0].layer_stages})
    words = [Path(options.model).stem if path else options.model, "+".join(formats)]
    if plan.ranks[0].head.format.value not in formats:
        words.append(f"{plan.ranks[0].head.format.value}-head")
    kv = plan.ranks[0].kv.format.value
    if options.kv_dtype != "auto":
        words.append(f"{kv}-kv")
    name = "-".join(["decode", machine, *words])
    publish(
        name.lower(),
        {
            **facts, **kernel_facts(backend, options.model, path),
            "model": path.name if path else options.model, "backend": options.backend, "dtype": plan.format.value,
            "formats": {stage.name: stage.format.value for stage in plan.ranks[0].stages},
            "kv": kv, "workers": plan.machine.workers, "plan": plan.digest, "read_bandwidth": bandwidth,
            "weight_bytes": plan.weight_bytes, "peak_memory_after_load": load_peak,
            "peak_over_weights": load_peak / plan.weight_bytes, "results": rows, "peers": others,
        },
        save=options.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
