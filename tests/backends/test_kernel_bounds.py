"""The kernel touches only memory that it was given: every allocation here ends at a guard page."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import ids, reference
from backends.guarded_memory import GuardedMemory
from backends.host_kernel import host_gpu
from backends.host_setups import on_machines
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.protocol import Job
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_soon")]

CONTEXT = 96  # of which a prompt and its tokens take all
LONG = {"max_position_embeddings": CONTEXT}
CASES = {
    "tied": Case("tied", "llama", {"head_dim": 16, "hidden_size": 96, "tie_word_embeddings": True, **LONG}),
    "odd": Case("odd", "qwen3", {"head_dim": 48, "hidden_size": 54, "num_hidden_layers": 2, **LONG}),
    "wide": Case("wide", "mistral", {"head_dim": 128, "sliding_window": 40, "num_hidden_layers": 2, **LONG}),
}
TOKENS = tuple(np.random.default_rng(5).integers(3, 131, 90).tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints, by the names of CASES."""
    folder = tmp_path_factory.mktemp("bounds")
    for name, case in CASES.items():
        make_checkpoint(case, folder / name)
    return folder


@contextmanager
def loaded(place: Path, case: str, workers: int, gpu: str = "cuda") -> Iterator[CudaBackend]:
    with host_gpu():
        checkpoint = open_checkpoint(place / case)
        spec = spec_from_config(checkpoint.config)
        plan = gpu_plan(spec, workers, CONTEXT, tuning=Tuning(units_per_split=1), backend=gpu)
        backend = CudaBackend.load(spec, plan, checkpoint)
        backend._params.deadline_ns = 10**12  # no fault but those of memory
        try:
            yield backend
        finally:
            backend.close()


@on_machines(
    "case, workers, prompt, count",
    [("tied", 12, 70, 4), ("tied", 12, 1, 2), ("odd", 7, 90, 6), ("wide", 2, 65, 3)],
    hip=(2, 3),
    fixture="gpu",
)
def test_a_request_stays_within_its_memory(
    place: Path, gpu: str, case: str, workers: int, prompt: int, count: int
) -> None:
    """A prompt in rows, then tokens: once up to the last position."""
    with loaded(place, case, workers, gpu) as backend:
        got = ids(list(backend.start(Job(TOKENS[:prompt], 0, count), backend.new_sequence())))
    want = reference(place / case, CONTEXT)
    logits = want.logits((*TOKENS[:prompt], *got[:-1]), want.new_sequence())[prompt - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(count), got]
    assert (behind <= 0.04 * np.linalg.norm(logits, axis=1)).all()


@on_machines(
    "name, missing",  # bytes at the end
    [
        ("tapes", 16),
        ("places", 17 * 16),  # all of the head
        ("spans", 16),
        ("logits", 9 * 4),  # eight of them are spare
        ("exchange", 12 * 16 + 32),  # what workers waited for, choices, and the counters
        ("sines", 95 * 32),
    ],
    hip=(0, 3),
    fixture="gpu",
)
def test_less_memory_than_the_kernel_needs_is_noticed(place: Path, gpu: str, name: str, missing: int) -> None:
    """Of what bulk copies read, and plain loads, and of what is written."""
    with loaded(place, "tied", 12, gpu) as backend:
        whole = backend._memories[name]
        backend._memories[name] = DeviceMemory.of(whole.read(np.empty(whole.bytes, np.uint8))[:-missing])
        setattr(backend._params, name, backend._memories[name].pointer)
        with pytest.raises(AssertionError, match=r"outside of all memory.*block"):
            list(backend.start(Job(TOKENS[:3], 0, 3), backend.new_sequence()))


def test_the_end_of_the_highest_memory_is_noticed(place: Path) -> None:
    """Each die sees memory through a mapping of its own, which ends with the highest one."""
    page = mmap.PAGESIZE
    spare = [
        GuardedMemory(page) for _ in range(400)
    ]  # they take all gaps that lie higher than what is loaded
    with loaded(place, "tied", 12, "hip") as backend:
        whole = backend._memories["logits"]
        max(spare, key=lambda memory: memory.address).close()
        shorter = DeviceMemory.of(whole.read(np.empty(whole.bytes, np.uint8))[: -9 * 4])
        backend._params.logits = shorter.pointer
        with pytest.raises(AssertionError, match=r"outside of all memory.*block"):
            list(backend.start(Job(TOKENS[:3], 0, 3), backend.new_sequence()))
        shorter.close()


@on_machines(fixture="gpu")
def test_a_vector_at_a_crooked_address_is_noticed(place: Path, gpu: str) -> None:
    with loaded(place, "tied", 12, gpu) as backend:
        if gpu == "cuda":
            backend._params.rows.normed += 8
        else:  # CDNA3 loads vectors from anywhere, but no block of weights begins there
            backend._params.tapes += 8
        with pytest.raises(AssertionError, match=r"misaligned access.*block"):
            list(backend.start(Job(TOKENS[:3], 0, 3), backend.new_sequence()))


@on_machines(fixture="gpu")
def test_memory_that_was_given_back_is_noticed(place: Path, gpu: str) -> None:
    with loaded(place, "tied", 12, gpu) as backend:
        backend._memories["final_norm"].close()
        with pytest.raises(AssertionError, match="outside of all memory"):
            list(backend.start(Job(TOKENS[:3], 0, 3), backend.new_sequence()))
