"""`make test-hip`: a self-test of a few minutes for the first person with an MI300X, and one report to send back.

    python bench/hip.py --out hip-report.json

No GPU of AMD has run this. Every step is tried whatever became of the ones before, and the report says what happened:
the machine; logits of small random models, one of them as INT4, beside the reference, rows and token by token; the same
bits three times; a lost word that must end at the deadline; decode of two shapes, by the GPU's own clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measuring import prompt_of, run_request
from monotape.backends.hip.backend import HipBackend
from monotape.backends.hip.compilation import code_usage, find_compiler
from monotape.backends.protocol import Backend, Job
from monotape.config import told_commit
from monotape.engine.asked import Asked, formats_for
from monotape.engine.loading import load_backend
from monotape.errors import DeadlineFault, MonotapeError
from monotape.models.registry import spec_from_config
from monotape.weights.checkpoint import Checkpoint
from shapes import RandomCheckpoint

#: Small models with heads of 64 and of 128 values, with and without norms of q and k.
SMALL: dict[str, RandomCheckpoint] = {
    "heads of 64": RandomCheckpoint("llama-3.2-1b", num_hidden_layers=2, vocab_size=4096),
    "heads of 128, normalised": RandomCheckpoint("qwen3-0.6b", num_hidden_layers=2, vocab_size=4096),
}
DECODED = {name: RandomCheckpoint(name) for name in ("llama-3.2-1b", "qwen3-0.6b")}
TOLERANCE = 0.04  # of the logits' norm, as in tests/backends/host_setups.py
CONTEXT, DEADLINE_NS = 1024, 200_000_000
Facts = dict[str, Any]
Models = Mapping[str, RandomCheckpoint]


def load(checkpoint: Checkpoint, backend: str = "hip", dtype: str = "bf16") -> Backend:
    spec = spec_from_config(checkpoint.config)
    return load_backend(
        backend, spec, checkpoint, dtype=dtype if backend == "hip" else "auto", context=CONTEXT
    )


def rounded(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The numbers that its weights are as codes."""
    return formats_for("hip", Asked(dtype, "auto", "auto"), spec_from_config(checkpoint.config), checkpoint)[
        0
    ]


def distance(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def machine() -> Facts:
    from monotape.backends.cuda.driver import device_name, memory_free_and_total
    from monotape.backends.hip.backend import processors

    units = processors()
    free, total = memory_free_and_total()
    return {
        "gpu": device_name(), "compute_units": units, "free_bytes": free, "total_bytes": total,
        "compiler": find_compiler(), "commit": told_commit(),
    }  # fmt: skip


def logits(checkpoint: RandomCheckpoint, dtype: str = "bf16", rows: int = 70, tokens: int = 4) -> Facts:
    """Three times the same, and close to the reference: a prompt in rows, then one token at a time."""
    backend, want = load(checkpoint, dtype=dtype), load(rounded(checkpoint, dtype), "reference")
    assert isinstance(backend, HipBackend)
    try:
        prompt = prompt_of(rows + tokens, backend.spec.vocab)
        exact = want.logits(prompt, want.new_sequence())
        runs = []
        for _ in range(3):
            sequence = backend.new_sequence()
            parts = [
                backend.logits(prompt[:rows], sequence),
                backend.logits(prompt[rows:], sequence, chunk=0),
            ]
            runs.append(parts)
        far = [
            distance(part, exact[at])
            for part, at in zip(runs[0], (slice(rows), slice(rows, None)), strict=True)
        ]
        same = all(
            np.array_equal(one, two) for run in runs[1:] for one, two in zip(run, runs[0], strict=True)
        )
        return {"good": same and max(far) < TOLERANCE, "same_bits": same, "rows": far[0], "tokens": far[1]}
    finally:
        backend.close()


def faults(checkpoint: RandomCheckpoint) -> Facts:
    """A word that never comes ends the request at the deadline, by name."""
    backend = load(checkpoint)
    assert isinstance(backend, HipBackend)
    try:
        backend._params.deadline_ns = DEADLINE_NS
        backend.lose_word_of("output")
        try:
            list(backend.start(Job(prompt_of(5, backend.spec.vocab), 0, 3), backend.new_sequence()))
        except DeadlineFault as error:
            return {"good": True, "said": error.message}
        return {"good": False, "said": "the request ended without a fault"}
    finally:
        backend.close()


def decode(checkpoint: RandomCheckpoint, tokens: int = 128, requests: int = 5) -> Facts:
    backend = load(checkpoint)
    assert isinstance(backend, HipBackend)
    try:
        sequence, prompt = backend.new_sequence(), prompt_of(32, backend.spec.vocab)
        run_request(backend, sequence, prompt, 0, tokens)
        speeds = [
            run_request(backend, sequence, prompt, 31, tokens).tokens_per_second for _ in range(requests)
        ]
        read = backend.plan.token_bytes(32 + tokens // 2)
        return {
            "good": True, "tokens_per_second": speeds, "median": statistics.median(speeds), "bytes_per_token": read,
        }  # fmt: skip
    finally:
        backend.close()


def kernel(checkpoint: RandomCheckpoint) -> Facts:
    """What the code object says of itself."""
    from monotape.backends.cuda.header import plan_header
    from monotape.compiler.gpu import gpu_plan

    plan = gpu_plan(spec_from_config(checkpoint.config), 304, CONTEXT, backend="hip")
    usage = code_usage(HipBackend.compile(plan_header(plan)))
    return {name: getattr(usage, name) for name in usage.__slots__}


def steps(small: Models, decoded: Models) -> dict[str, Callable[[], Facts]]:
    return {
        "machine": machine,
        **{f"logits, {name}": partial(logits, model) for name, model in small.items()},
        "logits, int4": partial(logits, next(iter(small.values())), "int4"),
        "a lost word": partial(faults, next(iter(small.values()))),
        **{f"kernel of {name}": partial(kernel, model) for name, model in decoded.items()},
        **{f"decode of {name}": partial(decode, model) for name, model in decoded.items()},
    }


def report(small: Models, decoded: Models) -> Facts:
    found: Facts = {}
    for name, step in steps(small, decoded).items():
        print(f"{name} ...", flush=True)
        try:
            found[name] = step()
        except MonotapeError as error:
            found[name] = {"good": False, "error": f"{error}"}
        except Exception:  # the report is worth more than the traceback on a screen
            found[name] = {"good": False, "error": traceback.format_exc()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("hip-report.json"))
    options = parser.parse_args()
    found = report(SMALL, DECODED)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(f"Please open an issue with {options.out} in it, whatever it says.")
    return 0 if all(facts.get("good", True) for facts in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
