"""What all benchmarks of the engine share: a model to run, prompts, one timed request, and the machine's ceiling."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from monotape.backends.protocol import Backend, Job, KvSequence, Sampling
from monotape.engine.loading import load_backend
from monotape.errors import UsageError
from monotape.models.registry import spec_from_config
from monotape.weights.checkpoint import Checkpoint
from shapes import RandomCheckpoint, all_shapes
from stored_shapes import STORED, StoredShape

#: A usual way to chat, for comparing sampled decoding with greedy.
SAMPLED = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=1)
_LOOK_AGAIN_S = 0.2


def integers(text: str) -> list[int]:
    """32,1024,8192"""
    return [int(number) for number in text.split(",")]


def add_model_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--model", default=default, help=f"path, hub id, or one of {', '.join(all_shapes())}")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", help="default: q8 on a CPU, as stored on a GPU")
    parser.add_argument("--stored", choices=STORED, help="how a shape's layers are stored; else in bf16")
    parser.add_argument("--stored-head", choices=STORED, help="how its head is stored")
    parser.add_argument("--kv-dtype", default="auto", help="of keys and values: auto or fp8")
    parser.add_argument("--skewed-router", action="store_true", help="a shape's routers prefer a few experts")
    parser.add_argument("--workers", type=int, help="threads; all by default, and always on a GPU")
    parser.add_argument(
        "--no-speculation", dest="speculation", action="store_false",
        help="on a GPU, make no second kernel for drafts; no draft is checked either way",
    )  # fmt: skip
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")


def open_model(
    name: str, stored: str | None = None, head: str | None = None, *, skewed: bool = False
) -> tuple[Checkpoint, Path | None]:
    """A named shape with random weights, or a checkpoint and where it lies."""
    if name in all_shapes() and (stored or head):
        return StoredShape(name, stored, head, skewed=skewed), None
    if name in all_shapes():
        return RandomCheckpoint(name, skewed=skewed), None
    from monotape.weights.hub import resolve
    from monotape.weights.open import open_checkpoint

    path = resolve(name)
    return open_checkpoint(path), path


def load_model(
    options: argparse.Namespace, context: int, tp: int | None = None
) -> tuple[Backend, Path | None]:
    """With several ranks, all of them share one GPU."""
    checkpoint, path = open_model(
        options.model, options.stored, options.stored_head, skewed=getattr(options, "skewed_router", False)
    )
    dtype = options.dtype or ("q8" if options.backend == "cpu" else "auto")
    backend = load_backend(
        options.backend, spec_from_config(checkpoint.config), checkpoint,
        dtype=dtype, context=context, workers=options.workers, tp=tp,
        emulate_ranks=tp is not None and options.backend == "cuda",
        speculation=getattr(options, "speculation", True), kv_dtype=getattr(options, "kv_dtype", "auto"),
    )  # fmt: skip
    return backend, path


def read_bandwidth(backend: Backend) -> float:
    """Bytes per second that the machine reads, by nothing but reading."""
    if backend.name == "cuda":
        from monotape.backends.cuda.bandwidth import measure_bandwidth as measure_gpu

        return measure_gpu()
    from monotape.backends.cpu.bandwidth import measure_bandwidth

    return measure_bandwidth(backend.plan.machine.workers).bytes_per_second


def gpu_facts(backend: Backend) -> dict[str, Any]:
    """What a report of a GPU names: which one, and how much of its memory the model takes."""
    if backend.name != "cuda":
        return {}
    from monotape.backends.cuda.driver import device_name, memory_free_and_total

    free, total = memory_free_and_total()
    return {"gpu": short_name(device_name()), "gpu_memory_used": total - free}


def kernel_facts(backend: Backend, model: str, path: Path | None, *, ceiling: bool = True) -> dict[str, Any]:
    """What binds a report of a GPU to machine code: the kernels that ran, that of the ceiling included."""
    if backend.name != "cuda":
        return {}
    from machine_code import evidence
    from monotape.weights.open import open_checkpoint
    from recipes import BANDWIDTH, recipes_of

    name, config = (path.name, open_checkpoint(path).config) if path else (model, {})
    return evidence([*recipes_of(backend, name, config), *([BANDWIDTH] if ceiling else [])])


def short_name(device: str) -> str:
    """NVIDIA H200 -> h200"""
    return device.lower().replace("nvidia", "").strip().split()[0]


def prompt_of(length: int, vocab: int, seed: int = 0) -> tuple[int, ...]:
    """Ids from all over the vocabulary; another seed gives a prompt without a common beginning."""
    return tuple(1 + (7919 * i + 104729 * seed + 31) % (vocab - 1) for i in range(length))


@dataclass(frozen=True, slots=True)
class Timed:
    """One request by the backend's own clock."""

    first_token_s: float
    times_ns: list[int]

    @property
    def tokens_per_second(self) -> float:
        return (len(self.times_ns) - 1) / ((self.times_ns[-1] - self.times_ns[0]) / 1e9)

    @property
    def gaps_s(self) -> list[float]:
        return [(after - before) / 1e9 for before, after in pairwise(self.times_ns)]


def run_request(
    backend: Backend, sequence: KvSequence, prompt: Sequence[int], cached: int, tokens: int,
    sampling: Sampling | None = None,
) -> Timed:  # fmt: skip
    # Without drafts: how fast a pass is. Random weights repeat themselves, and drafts of that would be accepted.
    job = Job(tuple(prompt), cached, tokens, sampling=sampling or Sampling(), drafts=False)
    generation = backend.start(job, sequence)
    times = [token.time_ns for token in generation]
    assert len(times) == tokens, f"{len(times)} of {tokens} tokens: {generation.finish_reason}"
    return Timed((times[0] - generation.start_ns) / 1e9, times)


def p99_over_p50(gaps_s: Sequence[float]) -> float:
    ordered = sorted(gaps_s)
    return ordered[int(0.99 * (len(ordered) - 1))] / statistics.median(ordered)


def await_drafts(backend: Backend) -> None:
    """Returns when the kernel for drafts is there, if the model has one: it is compiled while requests run already."""
    if not getattr(backend, "pending", False):
        return
    sequence = backend.new_sequence()
    while backend.pending:  # type: ignore[attr-defined]
        for _ in backend.start(
            Job((1,), 0, 1), sequence
        ):  # a request that may have drafts loads what is compiled
            pass
        sequence.truncate(0)
        time.sleep(_LOOK_AGAIN_S)
    if backend.drafting is None:  # type: ignore[attr-defined]
        raise UsageError("There is no kernel for drafts to be measured.", "The warning above says why.")


def launches(backend: Any) -> int | None:
    """Kernel launches so far, where there are any to count."""
    return int(backend.kernel.launches) if backend.name == "cuda" else None
