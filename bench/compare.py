"""Decode speed beside other engines: the same shapes, the same GPU, one run, as ratios.

    python bench/compare.py --shapes llama-3.2-1b,dense-2b --tokens 256 --save

Weights are random everywhere; every engine decodes greedily at batch size 1 after a prompt of --context ids. The only
benchmark that imports torch. vLLM joins in where it can be imported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from measuring import gpu_facts, kernel_facts, load_model, prompt_of, read_bandwidth, run_request
from report import publish, spread
from shapes import SHAPES

OWN = "monotape"


def parse_arguments() -> argparse.Namespace:
    from peers_gpu import PEERS

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=names, default=["llama-3.2-1b", "dense-2b"], help=", ".join(SHAPES))
    parser.add_argument(
        "--engines", type=names, default=["torch-compile", "transformers", "vllm"], help=", ".join(PEERS)
    )
    parser.add_argument("--backend", default="cuda", choices=["cpu", "cuda"], help="cpu is for trying it out")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    options = parser.parse_args()
    unknown = (set(options.shapes) - set(SHAPES)) | (set(options.engines) - set(PEERS))
    if unknown:
        sys.exit(f"Unknown: {', '.join(sorted(unknown))}. See --help.")
    return options


def own_row(options: argparse.Namespace, shape: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our own speed on a shape against the ceiling, and what the machine is."""
    settings = argparse.Namespace(model=shape, backend=options.backend, dtype=None, workers=None)
    backend, _ = load_model(settings, options.context + options.tokens)
    facts, bandwidth = gpu_facts(backend), read_bandwidth(backend)
    facts |= kernel_facts(backend, shape, None)
    sequence, prompt = backend.new_sequence(), prompt_of(options.context, backend.spec.vocab)
    run_request(backend, sequence, prompt, 0, options.tokens)
    speeds = [
        run_request(backend, sequence, prompt, options.context - 1, options.tokens).tokens_per_second
        for _ in range(options.requests)
    ]
    read = backend.plan.token_bytes(options.context + options.tokens // 2)
    backend.close()
    return row(OWN, shape, speeds, bandwidth / read, None), {**facts, "bandwidth": bandwidth}


def row(engine: str, shape: str, speeds: list[float], ceiling: float, own: float | None) -> dict[str, Any]:
    median = statistics.median(speeds)
    found = {
        "engine": f"{engine}, {shape}",
        "tokens_per_second": spread(speeds),
        "ceiling_tokens_per_second": ceiling,
        "share_of_ceiling": median / ceiling,
    }
    return found if own is None else {**found, "monotape_over_it": own / median}


def measure(options: argparse.Namespace, shape: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from peers_gpu import Task, available, speeds_of

    first, facts = own_row(options, shape)
    own, ceiling = first["tokens_per_second"]["median"], first["ceiling_tokens_per_second"]
    rows = [first]
    print_row(first)
    task = Task(shape, options.context, options.tokens, options.requests, options.backend)
    for name in options.engines:
        if name in available():
            rows.append(row(name, shape, speeds_of(name, task), ceiling, own))
            print_row(rows[-1])
        else:
            print(f"{name} is not installed here")
    return rows, facts


def print_row(found: dict[str, Any]) -> None:
    speed = found["tokens_per_second"]["median"]
    ratio = f"  monotape is {found['monotape_over_it']:.2f}x" if "monotape_over_it" in found else ""
    share = 100 * found["share_of_ceiling"]
    print(f"{found['engine']:<34} {speed:>9.1f} tok/s {share:>5.1f}% of the ceiling{ratio}", flush=True)


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in ("torch", "transformers", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    options = parse_arguments()
    for shape in options.shapes:  # each has a report of its own: a peer may take minutes to compile the next
        engines, facts = measure(options, shape)
        bandwidth = facts.pop("bandwidth")
        facts.pop("gpu_memory_used", None)
        publish(
            f"compare-{facts.get('gpu', options.backend)}-{shape}".lower(),
            {
                **facts, "backend": options.backend, "dtype": "bf16", "context": options.context,
                "tokens": options.tokens, "read_bandwidth": bandwidth,
                **{f"{name}_version": text for name, text in versions().items()},
                "engines": engines,
            },
            save=options.save,
        )  # fmt: skip


if __name__ == "__main__":
    main()
