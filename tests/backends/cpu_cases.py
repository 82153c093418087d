"""What tests of backends share: loading a small checkpoint in any format, running jobs on it, and measuring results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.protocol import Backend, Generation, Job, Sampling, Token
from monotape.backends.reference.backend import ReferenceBackend
from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

PROMPT = tuple(np.random.default_rng(7).integers(3, 131, 75).tolist())  # longer than a prefill chunk


@contextmanager
def cpu(
    folder: Path, dtype: str = "f32", workers: int | None = 2, context: int = 160, tp: int | None = None
) -> Iterator[CpuBackend]:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    backend = load_backend("cpu", spec, checkpoint, dtype=dtype, context=context, workers=workers, tp=tp)
    assert isinstance(backend, CpuBackend)
    try:
        yield backend
    finally:
        backend.close()


def reference(
    folder: Path, context: int = 160, tp: int | None = None, kv_dtype: str = "auto"
) -> ReferenceBackend:
    checkpoint = open_checkpoint(folder)
    backend = load_backend(
        "reference", spec_from_config(checkpoint.config), checkpoint, dtype="f32", context=context, tp=tp,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    assert isinstance(backend, ReferenceBackend)
    return backend


def generate(
    backend: Backend, prompt: tuple[int, ...] = PROMPT[:5], count: int = 40, *, sampling: Sampling | None = None,
    logprobs: int | None = None, stop_ids: tuple[int, ...] = (), min_tokens: int = 0,
) -> list[Token]:  # fmt: skip
    job = Job(prompt, 0, count, stop_ids, min_tokens, sampling or Sampling(), logprobs)
    return list(backend.start(job, backend.new_sequence()))


def ids(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


def take_until_cancelled(generation: Generation, after: int) -> int:
    """Cancels after so many tokens, and takes what still comes: how many there were."""
    if after == 0:
        generation.cancel()
    seen = 0
    for _ in generation:
        seen += 1
        if seen == after:
            generation.cancel()
    return seen


def distance(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
