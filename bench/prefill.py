"""Time to first token against the physical ceiling, and the second turn of a conversation.

    python bench/prefill.py --backend cuda --model llama-3.2-1b --prompts 64,1024,8192 --second-turn 4096,64 --save
    python bench/prefill.py --backend cpu --model PATH --prompts 512,6000 --second-turn 512,64 --requests 3 --save

By the host's clock: from the call that starts the request to the first token in Python. The ceiling is the longer of
reading all weights once and computing all products at the tensor cores' rate on the datasheet. No datasheet names such
a rate for a CPU, so there it is reading alone, which long prompts are far from.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import (
    add_model_arguments,
    gpu_facts,
    integers,
    kernel_facts,
    launches,
    load_model,
    prompt_of,
    read_bandwidth,
)
from monotape.backends.protocol import Backend, Job, KvSequence
from monotape.models.spec import ModelSpec
from monotape.planner.catalogue import find_gpu
from report import publish, spread


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser, "llama-3.2-1b")
    parser.add_argument("--prompts", type=integers, default=[64, 1024, 8192], help="lengths of prompts")
    parser.add_argument(
        "--second-turn",
        type=integers,
        default=[4096, 64],
        metavar="CACHED,NEW",
        help="tokens kept, and new ones",
    )
    parser.add_argument("--requests", type=int, default=7)
    parser.add_argument(
        "--tp", type=int, help="ranks, which share one GPU; the ceiling is that of one rank on all of it"
    )
    return parser.parse_args()


def first_token_s(backend: Backend, sequence: KvSequence, prompt: Sequence[int], cached: int) -> float:
    job = Job(tuple(prompt), cached, 1)
    start = time.perf_counter()
    tokens = iter(backend.start(job, sequence))
    next(tokens)
    taken = time.perf_counter() - start
    for _ in tokens:  # the kernel's end is not part of the first token
        pass
    return taken


def measure(
    backend: Backend, sequence: KvSequence, prompt: Sequence[int], cached: int, requests: int
) -> list[float]:
    first_token_s(backend, sequence, prompt, cached)  # warms up
    return [first_token_s(backend, sequence, prompt, cached) for _ in range(requests)]


def flops(spec: ModelSpec, cached: int, new: int) -> float:
    """Multiplications and additions of `new` tokens after `cached`: matrices, attention, and one row of the head."""
    matrices = spec.layers * spec.width * (2 * spec.q_rows + 2 * spec.kv_rows + 3 * spec.ffn)
    pairs = new * cached + new * (new + 1) / 2  # of a query and a key
    attention = 4 * spec.layers * spec.q_rows * pairs
    return 2.0 * matrices * new + attention + 2 * spec.width * spec.vocab


def ceiling_s(backend: Backend, bandwidth: float, gpu: str | None, cached: int, new: int) -> float:
    reading = backend.plan.token_bytes(cached) / bandwidth
    rate = find_gpu(gpu).bf16_tflops if gpu else None
    return max(reading, flops(backend.spec, cached, new) / (rate * 1e12)) if rate else reading


def row(times: list[float], cached: int, new: int, ceiling: float) -> dict[str, Any]:
    median = statistics.median(times)
    return {
        "prompt": cached + new,
        "cached": cached,
        "first_token_ms": spread([1e3 * taken for taken in times]),
        "ceiling_ms": 1e3 * ceiling,
        "share": ceiling / median,
        "new_tokens_per_second": new / median,
    }


def run(
    options: argparse.Namespace, backend: Backend, bandwidth: float, gpu: str | None
) -> list[dict[str, Any]]:
    vocab, rows = backend.spec.vocab, []
    kept, new = options.second_turn
    turns = [(0, length) for length in options.prompts] + [(kept, new)]
    for cached, count in turns:
        sequence = backend.new_sequence()
        prompt = prompt_of(cached + count, vocab)
        if cached:
            first_token_s(backend, sequence, prompt[:cached], 0)
        times = measure(backend, sequence, prompt, cached, options.requests)
        rows.append(row(times, cached, count, ceiling_s(backend, bandwidth, gpu, cached, count)))
    return rows


def print_table(rows: list[dict[str, Any]], bandwidth: float) -> None:
    print(f"read bandwidth {bandwidth / 1e9:,.2f} GB/s")
    print(
        f"{'prompt':>8} {'cached':>8} {'ceiling ms':>11} {'first token':>12} {'min':>8} {'max':>8} {'share':>6}"
        f" {'tok/s':>9}"
    )
    for r in rows:
        taken = r["first_token_ms"]
        print(
            f"{r['prompt']:>8} {r['cached']:>8} {r['ceiling_ms']:>11.3f} {taken['median']:>12.3f}"
            f" {taken['min']:>8.3f} {taken['max']:>8.3f} {100 * r['share']:>5.1f}% {r['new_tokens_per_second']:>9.1f}"
        )


def main() -> None:
    options = parse_arguments()
    backend, path = load_model(options, max(*options.prompts, sum(options.second_turn)) + 8, options.tp)
    facts = gpu_facts(backend)
    gpu = facts.get("gpu")
    before = launches(backend)
    bandwidth = read_bandwidth(backend)
    rows = run(options, backend, bandwidth, gpu)
    after = launches(backend)
    print_table(rows, bandwidth)
    requests = len(rows) * (options.requests + 1) + 1  # and the turn before the second one
    model = (Path(options.model).stem if path else options.model) + (f"-tp{options.tp}" if options.tp else "")
    publish(
        f"prefill-{gpu or options.backend}-{model}-{backend.plan.format.value}".lower(),
        {
            **facts, **kernel_facts(backend, options.model, path),
            "model": path.name if path else options.model, "backend": options.backend,
            "dtype": backend.plan.format.value, "workers": backend.plan.machine.workers,
            "plan": backend.plan.digest, "read_bandwidth": bandwidth,
            "launches_per_request": None if before is None or after is None else (after - before) / requests,
            "prefill": rows,
        },
        save=options.save,
    )  # fmt: skip
    backend.close()


if __name__ == "__main__":
    main()
