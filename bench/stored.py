"""Decode speed of GGUF files as they are stored, on the CPU, and llama.cpp compiled for this CPU on the same files.

    python -m venv llamacpp && llamacpp/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    python bench/stored.py --llama-python llamacpp/bin/python --rounds 20 --save FILE...

A round measures one request of Monotape and one of llama.cpp, and at times the read bandwidth. On a machine that others
use too, most rounds are disturbed: the speed of an engine is that of its best round, for both engines alike, and the
bandwidth is the best of all rounds and of what this machine has kept. A round's speed is the median over its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from measuring import prompt_of, run_request
from monotape.backends.cpu.bandwidth import available_cpus, kept_bandwidth, measure_bandwidth
from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint
from report import publish, spread

CONTEXT, TOKENS = 32, 32


class LlamaCpp:
    """A process that decodes with llama.cpp when it is told to."""

    def __init__(self, python: Path, path: Path, prompt: list[int]) -> None:
        child = Path(__file__).parent / "llamacpp_child.py"
        settings = (path, available_cpus(), CONTEXT + TOKENS + 16, TOKENS, json.dumps(prompt))
        self._process = subprocess.Popen(
            [python, child, *map(str, settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.facts: dict[str, str] = self._answer()

    def speed(self) -> float:
        """Tokens per second of one request."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(1 / statistics.median(self._answer()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def measure(path: Path, python: Path | None, rounds: int) -> dict[str, Any]:
    """One file: both engines in turn, `rounds` times."""
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    backend = load_backend("cpu", spec, checkpoint, context=CONTEXT + TOKENS)
    prompt = prompt_of(CONTEXT, spec.vocab)
    peer = None if python is None else LlamaCpp(python, path, list(prompt))
    sequence = backend.new_sequence()
    ours, theirs, bandwidths = [], [], []
    for number in range(rounds):
        timed = run_request(backend, sequence, prompt, CONTEXT - 1 if number else 0, TOKENS, None)
        ours.append(1 / statistics.median(timed.gaps_s))
        if peer is not None:
            theirs.append(peer.speed())
        if number % 4 == 0:
            bandwidths.append(measure_bandwidth().bytes_per_second)
        print(f"{path.name} {number}: {ours[-1]:.1f} {theirs[-1] if theirs else 0:.1f}", flush=True)
    kept = kept_bandwidth()
    bandwidth = max(*bandwidths, kept.bytes_per_second if kept else 0)
    read = backend.plan.token_bytes(CONTEXT + TOKENS // 2)
    found: dict[str, Any] = {
        "model": path.name, "formats": backend.plan.formats, "file_bytes": path.stat().st_size,
        "bytes_per_token": read, "best_tokens_per_second": max(ours), "tokens_per_second": spread(ours),
        "read_bandwidth": bandwidth, "bandwidth_share": max(ours) * read / bandwidth,
    }  # fmt: skip
    backend.close()
    if peer is not None:
        found |= {
            "llamacpp": peer.facts, "best_llamacpp_tokens_per_second": max(theirs),
            "llamacpp_tokens_per_second": spread(theirs), "over_llamacpp": max(ours) / max(theirs),
        }  # fmt: skip
        peer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument(
        "--llama-python", type=Path, help="the Python of an environment with llama-cpp-python"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="keep a report under reports/")
    options = parser.parse_args()
    rows = [measure(path, options.llama_python, options.rounds) for path in options.files]
    for row in rows:
        print(
            f"{row['model']}: {row['best_tokens_per_second']:.1f} tok/s, {100 * row['bandwidth_share']:.1f} % of "
            f"{row['read_bandwidth'] / 1e9:.1f} GB/s, {row.get('over_llamacpp', 0):.2f} times llama.cpp"
        )
    publish("stored-cpu", {"backend": "cpu", "workers": available_cpus(), "results": rows}, save=options.save)


if __name__ == "__main__":
    main()
