"""The last layer of a prefill computes only what is read: the same bits as of all rows, and less work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import ids
from backends.host_kernel import HostKernel, Schedule
from backends.host_setups import (
    CONTEXT,
    VOCAB,
    Load,
    checkpoints,
    loading_from,
    on_machines,
)
from backends.quantised_rows import encoded_run
from backends.source_edits import Line, put
from backends.test_kernel_formats import made_for
from backends.test_kernel_seams import on_host
from monotape.backends.cuda import packing
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.protocol import Job
from monotape.compiler.gpu import gpu_plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_soon")]

TOKENS = tuple(np.random.default_rng(5).integers(3, VOCAB, CONTEXT).tolist())
SCHEDULE = Schedule(2, stalls_per_million=20, stall_steps=20_000, delay_steps=3000)
MARK = 0x3F  # a byte of memory that no part has written; numbers, because padding is multiplied too
Bytes = NDArray[np.uint8]


ALL_ROWS = Line("rows/state.h", "return kRanks == 1 && layer == kLayers - 1;", "return false;")
MISTAKES = {
    "the last chunk has no last row": Line(
        "rows/product.h", "end_of(chunk) == c.params.prompt_length ? 1 : 0;", "0;"
    ),
    "a chunk ends before its keys and values": Line(
        "rows/state.h", "narrows() && number == kHeadsPart &&", "narrows() && number == kHeadsPart - 1 &&"
    ),
    "keys and values of the last row alone": Line(
        "rows/heads.h", "(head >= kHeads || row >= rows_state(c).first_query())", "row >= rows_state(c).first_query()"
    ),
    "columns of keys taken for queries": Line(
        "rows/product.h",
        "product.narrow_tiles / shape.column_tiles};",
        "divide_up(product.narrow_tiles, shape.column_tiles)};",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path, request: pytest.FixtureRequest) -> Iterator[Load]:
    with loading_from(place, request.param) as load:
        yield load


def prefilled(backend: CudaBackend, chunk: int | None, cached: int, count: int) -> tuple[Bytes, Bytes]:
    """The logits after a prompt of `count` tokens, and all KV."""
    HostKernel.schedule = SCHEDULE
    sequence = backend.new_sequence()
    if cached:
        backend.logits(TOKENS[:cached], sequence)
    for memory in backend._row_memories:
        memory.fill(MARK)
    assert len(list(CudaGeneration(backend, Job(TOKENS[:count], cached, 1), sequence, chunk))) == 1
    logits = backend._memories["logits"]
    return logits.read(np.empty(logits.bytes, np.uint8)), kv_of(sequence)


def kv_of(sequence: CudaSequence) -> Bytes:
    assert sequence._memory is not None
    return sequence._memory.read(np.empty(sequence.bytes, np.uint8))


def same(one: tuple[Bytes, Bytes], other: tuple[Bytes, Bytes]) -> bool:
    return all(np.array_equal(*parts) for parts in zip(one, other, strict=True))


@on_machines(
    "setup, chunk, cached, count",
    [
        ("two workers", 16, 0, 1),  # of few rows all is computed
        ("two workers", 16, 0, 16),
        ("two workers", 16, 0, 19),
        ("two workers", 16, 7, 60),
        pytest.param("odd heads", 32, 0, 70, marks=pytest.mark.wide),
        ("splits", 64, 30, 80),
        ("shapes", 144, 0, 140),  # two blocks of rows
        ("one layer", 32, 0, 70),
        ("experts", 128, 0, 70),
        ("experts", 16, 7, 41),
    ],
    hip=(3, 8),
)
def test_the_bits_are_those_of_a_prefill_of_all_rows(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    setup: str, chunk: int | None, cached: int, count: int,
) -> None:  # fmt: skip
    narrow = prefilled(load(setup), chunk, cached, count)
    put(ALL_ROWS, tmp_path, monkeypatch)
    assert same(narrow, prefilled(load(setup), chunk, cached, count))


@pytest.mark.long
@on_machines(fixture="gpu")
def test_the_bits_with_formats_that_are_converted(
    tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "coded_run", encoded_run)
    folder, spec, formats = made_for("floats", tmp_path / "model")
    plan = gpu_plan(spec, 3, CONTEXT, stage_formats=formats, backend=gpu)
    seen = []
    for _ in range(2):
        with on_host(folder, spec, plan) as backend:
            seen.append(prefilled(backend, 32, 0, 70))
        if len(seen) == 1:
            put(ALL_ROWS, tmp_path, monkeypatch)
    assert same(*seen)


@on_machines("name", [pytest.param(name, marks=pytest.mark.long) for name in MISTAKES], hip=())
def test_a_mistake_is_noticed(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = prefilled(load("shapes"), 64, 0, 150)
    put(MISTAKES[name], tmp_path, monkeypatch)
    assert not same(right, prefilled(load("shapes"), 64, 0, 150))


def written_rows(backend: CudaBackend, buffer: str, width: int) -> set[int]:
    """Rows of a buffer of 16-bit values of which anything but the mark is left."""
    names = [item.name for item in backend.gpu_rank.prefill.buffers]
    memory = backend._row_memories[names.index(buffer)]
    left = memory.read(np.empty(memory.bytes, np.uint8)).reshape(-1, width * 2)
    return set(np.flatnonzero((left != MARK).any(axis=1)).tolist())


@on_machines(hip=())
def test_only_what_is_read_is_computed(load: Load) -> None:
    """With one layer, the only queries are those of the prompt's last row; with all logits asked for, of all rows."""
    backend = load("one layer")
    width = backend.spec.heads * backend.spec.head_dim
    prefilled(backend, 32, 0, 70)
    assert written_rows(backend, "queries", width) == {5}  # 70 = 32 + 32 + 6
    prefilled(backend, 32, 0, 64)
    assert written_rows(backend, "queries", width) == {31}
    for memory in backend._row_memories:
        memory.fill(MARK)
    backend.logits(TOKENS[:70], backend.new_sequence(), 32)
    assert written_rows(backend, "queries", width) == set(range(32))


@on_machines(hip=())
def test_chunks_that_end_with_their_kv_are_cancelled_too(load: Load) -> None:
    """Their layer's last barrier is another one, and with one layer there is no earlier one."""
    backend, job = load("one layer"), Job(TOKENS[:128], 0, 1)
    HostKernel.schedule = Schedule(1)
    list(CudaGeneration(backend, job, backend.new_sequence(), 16))
    HostKernel.schedule = Schedule(1, cancel_at=HostKernel.steps // 3)
    sequence = backend.new_sequence()
    generation = CudaGeneration(backend, job, sequence, 16)
    assert ids(list(generation)) == []
    assert generation.finish_reason == "cancelled"
    assert 0 < sequence.length < 112 and sequence.length % 16 == 0  # before the last chunk
