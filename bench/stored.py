"""GGUF files as they are stored, on the CPU: decode speed beside llama.cpp, and how well they agree with float32.

    make llamacpp     # compiles llama-cpp-python for this CPU, in an environment of its own
    python bench/stored.py --llama-python .venv/llamacpp/bin/python --save FILE...

Every file is run as it is stored, and in each of WAYS. A round is one request of Monotape and, of the file as it is
stored, one of llama.cpp, in turn: 32 ids, then 128 greedy tokens. A speed is the median over the rounds, the read
bandwidth the best of the whole run. bench/agreement.py says what is compared on which text.

A busy machine is refused for --save. llama.cpp's threads spin where they wait for each other, so with other work on the
cores it loses far more than Monotape: a comparison there says nothing. The report holds how busy the machine was before
each way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agreement import Scores, agreement, scores_of, text_facts, text_ids
from llamacpp import LlamaCpp
from measuring import prompt_of, run_request
from monotape.backends.cpu.bandwidth import available_cpus, measure_bandwidth
from monotape.backends.protocol import Backend
from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from monotape.weights.checkpoint import Checkpoint, Quantised
from monotape.weights.forwarding import ForwardingCheckpoint
from monotape.weights.open import open_checkpoint
from monotape.weights.raw import RawMatrix
from quiet import busy_cores
from report import machine, publish, spread

CONTEXT = 32
QUIET = 0.2  # cores that other work may take


@dataclass(frozen=True, slots=True)
class Way:
    """How a file is loaded. `unpacked`: as if it stored floats, because weights of codes are not rounded to int4."""

    name: str
    dtype: str = "auto"
    head_dtype: str = "auto"
    unpacked: bool = False


REFERENCE, STORED = Way("f32", "f32"), Way("as stored")
#: The first one is what the others are compared with, and is not timed: float32 holds every stored value exactly.
WAYS = (
    REFERENCE, STORED, Way("bf16", "bf16"), Way("q8", "q8"), Way("int4, head q8", "int4", "q8", unpacked=True),
)  # fmt: skip


class Unpacked(ForwardingCheckpoint):
    """The same values, as a checkpoint that stores float32 has them."""

    def stored_as(self, name: str) -> str:
        return "f32" if super().stored_matrix(name) is not None else super().stored_as(name)

    def stored_matrix(self, name: str) -> Quantised | None:
        return None

    def raw_matrix(self, name: str) -> RawMatrix | None:
        return None

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        return None


@dataclass(frozen=True, slots=True)
class Settings:
    tokens: int
    rounds: int
    ids: tuple[int, ...]  # of the text


def load(checkpoint: Checkpoint, way: Way, settings: Settings) -> Backend:
    return load_backend(
        "cpu", spec_from_config(checkpoint.config), Unpacked(checkpoint) if way.unpacked else checkpoint,
        dtype=way.dtype, head_dtype=way.head_dtype, context=max(CONTEXT + settings.tokens, len(settings.ids)),
    )  # fmt: skip


def speeds(backend: Backend, settings: Settings, peer: LlamaCpp | None) -> tuple[list[float], list[float]]:
    """Tokens per second of each round, here and in the peer. The first round of both warms up."""
    prompt, sequence = prompt_of(CONTEXT, backend.spec.vocab), backend.new_sequence()
    ours, theirs = [], []
    for number in range(settings.rounds + 1):
        timed = run_request(backend, sequence, prompt, CONTEXT - 1 if number else 0, settings.tokens)
        ours.append(timed.tokens_per_second)
        if peer is not None:
            theirs.append(peer.speed())
    return ours[1:], theirs[1:]


def measure_way(
    path: Path, checkpoint: Checkpoint, way: Way, settings: Settings, reference: Scores | None, python: Path | None
) -> tuple[dict[str, Any], Scores]:  # fmt: skip
    """A row of the report without its ceiling, and what the model says of the text."""
    backend = load(checkpoint, way, settings)
    scores = scores_of(backend, settings.ids)
    row: dict[str, Any] = {
        "model": path.name, "weights": way.name, "context": CONTEXT, "formats": backend.plan.formats,
        "bytes_per_token": backend.plan.token_bytes(CONTEXT + settings.tokens // 2),
        **agreement(scores, scores if reference is None else reference),
    }  # fmt: skip
    peer = None
    if way is STORED and python is not None:
        prompt = prompt_of(CONTEXT, backend.spec.vocab)
        peer = LlamaCpp(python, path, prompt, settings.tokens, available_cpus())
    ours, theirs = speeds(backend, settings, peer) if way is not REFERENCE else ([], [])
    backend.close()
    if ours:
        row |= {"tokens_per_second": spread(ours), "best_tokens_per_second": max(ours)}
    if peer is not None:
        peer.close()
        row |= {
            "llamacpp_tokens_per_second": spread(theirs), "best_llamacpp_tokens_per_second": max(theirs),
            "monotape_times_as_fast": statistics.median(ours) / statistics.median(theirs),
            "llamacpp_version": peer.facts["version"], "llamacpp_system": peer.facts["system"],
        }  # fmt: skip
    return row, scores


def measure_file(path: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[float]]:
    """A row for each way, and the read bandwidth before each of them and at the end."""
    checkpoint = open_checkpoint(path)
    settings = Settings(options.tokens, options.rounds, text_ids(checkpoint, options.text_tokens))
    rows, bandwidths, reference = [], [], None
    for way in options.ways:
        busy = busy_cores()
        bandwidths.append(measure_bandwidth().bytes_per_second)
        row, scores = measure_way(path, checkpoint, way, settings, reference, options.llama_python)
        reference = reference or scores
        rows.append({**row, "text_tokens": len(settings.ids), "busy_cores_before": busy})
        print(said(row), flush=True)
    return rows, [*bandwidths, measure_bandwidth().bytes_per_second]


def said(row: dict[str, Any]) -> str:
    words = [
        f"{row['model']}, {row['weights']} ({row['formats']}): perplexity {row['perplexity']:.4f}",
        f"{100 * row['same_token_share']:.2f} % the same token, divergence {row['divergence_nats']:.2e}",
    ]
    if "tokens_per_second" in row:
        words.append(f"{row['tokens_per_second']['median']:.1f} tok/s")
    if "monotape_times_as_fast" in row:
        theirs = row["llamacpp_tokens_per_second"]["median"]
        words.append(
            f"llama.cpp {theirs:.1f} tok/s, Monotape {row['monotape_times_as_fast']:.2f} times as fast"
        )
    return "; ".join(words)


def with_ceiling(row: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    if "tokens_per_second" not in row:
        return row
    ceiling = bandwidth / row["bytes_per_token"]
    share = row["tokens_per_second"]["median"] / ceiling
    return {**row, "ceiling_tokens_per_second": ceiling, "bandwidth_share": share}


def chosen_ways(text: str) -> list[Way]:
    """f32,as stored"""
    known = {way.name.partition(",")[0]: way for way in WAYS}
    return [REFERENCE, *(known[name] for name in text.split(",") if name != REFERENCE.name)]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument(
        "--llama-python", type=Path, help="the Python of an environment with llama-cpp-python"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of a request")
    parser.add_argument("--text-tokens", type=int, help="of the text that is scored; all by default")
    parser.add_argument(
        "--ways", type=chosen_ways, default=list(WAYS), help="such as 'as stored,q8'; f32 is always there"
    )
    parser.add_argument("--save", action="store_true", help="keep a report under reports/")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    if options.save and (busy := busy_cores(3.0)) is not None and busy > QUIET:
        sys.exit(
            f"Other work takes {busy:.2f} cores of this machine. Wait until it is quiet, or leave out --save."
        )
    measured = [measure_file(path, options) for path in options.files]
    bandwidths = [one for _, of_file in measured for one in of_file]
    rows = [with_ceiling(row, max(bandwidths)) for rows, _ in measured for row in rows]
    publish(
        f"stored-cpu-{machine()['architecture']}",
        {
            "backend": "cpu", "workers": available_cpus(),
            "bandwidth_of_this_run": max(bandwidths), "bandwidth": {"read_bytes_per_second": spread(bandwidths)},
            "tokens": options.tokens, **text_facts(), "results": rows,
        },
        save=options.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
