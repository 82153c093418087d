"""Decode speed of one request against the physical ceiling: bytes a token must read / measured read bandwidth.

    python bench/decode.py --backend cpu --model PATH --compare llamacpp --save

MODEL is a path or hub id, or a named shape with random weights (see bench/shapes.py). The read bandwidth is measured
in the same run, before and after; the better of the two is the ceiling.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from llamacpp import decode_speeds, q8_0_decode_speeds
from monotape.backends.cpu.bandwidth import available_cpus, measure_bandwidth
from monotape.backends.protocol import Backend, Job
from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.hub import resolve
from monotape.weights.open import open_checkpoint
from report import publish, spread
from shapes import SHAPES, RandomCheckpoint

QWEN_CODER = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Decode speed at one context: one figure a request, and the time between tokens over all of them."""

    context: int
    speeds: list[float]
    gaps_s: list[float]
    bytes_per_token: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=QWEN_CODER, help=f"path, hub id, or one of {', '.join(SHAPES)}")
    parser.add_argument("--backend", default="cpu", choices=["cpu"])
    parser.add_argument("--dtype", default="q8")
    parser.add_argument("--workers", type=int, default=available_cpus())
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--compare", choices=["llamacpp"], help="run a peer on the same file in the same run")
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[Backend, Path | None]:
    path = None if options.model in SHAPES else resolve(options.model)
    checkpoint: Checkpoint = RandomCheckpoint(options.model) if path is None else open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    context = max(options.contexts) + options.tokens
    backend = load_backend(
        options.backend, spec, checkpoint, dtype=options.dtype, context=context, workers=options.workers
    )
    return backend, path


def prompt_of(length: int, vocab: int) -> tuple[int, ...]:
    return tuple(1 + 7919 * i % (vocab - 1) for i in range(length))


def measure(backend: Backend, context: int, tokens: int, requests: int) -> Measurement:
    speeds, gaps = [], []
    prompt = prompt_of(context, backend.spec.vocab)
    sequence = backend.new_sequence()
    for request in range(requests + 1):  # the first request warms up, and fills the KV that the others reuse
        times = [
            token.time_ns
            for token in backend.start(Job(prompt, min(sequence.length, context - 1), tokens), sequence)
        ]
        if request:
            speeds.append((len(times) - 1) / ((times[-1] - times[0]) / 1e9))
            gaps += [(after - before) / 1e9 for before, after in pairwise(times)]
    return Measurement(context, speeds, gaps, backend.plan.token_bytes(context + tokens // 2))


def peak_memory_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def row(measurement: Measurement, bandwidth: float) -> dict[str, Any]:
    speed = statistics.median(measurement.speeds)
    gaps = sorted(measurement.gaps_s)
    return {
        "context": measurement.context,
        "tokens_per_second": spread(measurement.speeds),
        "bytes_per_token": measurement.bytes_per_token,
        "ceiling_tokens_per_second": bandwidth / measurement.bytes_per_token,
        "bandwidth_share": speed * measurement.bytes_per_token / bandwidth,
        "p99_over_p50": gaps[int(0.99 * (len(gaps) - 1))] / statistics.median(gaps),
    }


def peers(options: argparse.Namespace, path: Path | None, vocab: int) -> dict[str, Any]:
    if options.compare is None:
        return {}
    if path is None or path.suffix != ".gguf":
        sys.exit("--compare llamacpp needs a GGUF file as --model.")
    prompt = prompt_of(options.contexts[0], vocab)
    arguments = (path, prompt, options.tokens, options.requests, options.workers)
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
            f" {speed['max']:>7.1f} {100 * r['bandwidth_share']:>5.1f}% {r['p99_over_p50']:>8.2f}"
        )
    for name, speed in others.items():
        print(f"{name}: {speed['median']:.1f} tok/s ({speed['min']:.1f} to {speed['max']:.1f})")


def main() -> None:
    options = parse_arguments()
    backend, path = load(options)
    load_peak = peak_memory_bytes()
    before = measure_bandwidth(options.workers)
    measurements = [
        measure(backend, context, options.tokens, options.requests) for context in options.contexts
    ]
    after = measure_bandwidth(options.workers)
    bandwidth = max(before.bytes_per_second, after.bytes_per_second)
    rows = [row(measurement, bandwidth) for measurement in measurements]
    vocab, plan = backend.spec.vocab, backend.plan
    backend.close()
    others = peers(options, path, vocab)
    print_table(rows, others, bandwidth)
    name = (
        f"decode-{options.backend}-{Path(options.model).stem if path else options.model}-{plan.format.value}"
    )
    publish(
        name.lower(),
        {
            "model": path.name if path else options.model, "backend": options.backend, "dtype": plan.format.value,
            "workers": options.workers, "plan": plan.digest, "read_bandwidth": bandwidth,
            "weight_bytes": plan.weight_bytes, "peak_memory_after_load": load_peak,
            "peak_over_weights": load_peak / plan.weight_bytes, "results": rows, "peers": others,
        },
        save=options.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
