"""Rows a pass is a constant of the kernel: each of several rows gets the bits of a pass of its own."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.host_kernel import HostKernel, Schedule, host_gpu
from backends.host_setups import CASES, CONTEXT, on_machines
from families import make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.protocol import Job
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.models.registry import spec_from_config
from monotape.plan.formats import TILE_ROWS
from monotape.plan.gpu import GpuRank
from monotape.plan.gpu_machines import WORD_VALUES
from monotape.weights.open import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_soon")]

SETUPS = {  # a case, its workers and blocks of a page
    "narrow": ("narrow", 2, None),
    "biases and two batches": ("broad", 2, None),
    "long tiles": ("long", 3, 16),  # a tile of `down` takes three pages
}
SCHEDULES = (Schedule(1), Schedule(2, stalls_per_million=500, stall_steps=50_000, delay_steps=2000))
Values = NDArray[np.float32]


def fill_exchange(backend: CudaBackend, rows: Values) -> None:
    """Every buffer that a stage reads, of even and odd turns, has the same values for a row: bf16, words of eight.

    Rows follow each other, each with all its buffers.
    """
    memory, own = backend._memories["exchange"], backend.gpu_rank
    words = memory.read(np.empty(memory.bytes, np.uint8)).view(np.uint16).reshape(-1, WORD_VALUES)
    halves = (rows.view(np.uint32) >> 16).astype(np.uint16)
    for buffer in own.buffers:
        if buffer.name == "candidates":
            continue
        taken = halves[:, : buffer.words * WORD_VALUES].reshape(len(rows), -1, WORD_VALUES)
        for copy, (number, row) in itertools.product(range(buffer.copies), enumerate(taken)):
            start = number * own.row_words + buffer.start + copy * buffer.stride
            words[start : start + buffer.words] = row
    memory.write(words.view(np.uint8).reshape(-1))


def products(folder: Path, setup: str, rows: Values, schedule: Schedule, gpu: str) -> Values:
    """What every matrix stage of a token gives: [steps, outputs, rows]."""
    _, workers, page_blocks = SETUPS[setup]
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    tuning = Tuning(page_blocks=page_blocks, rows=len(rows))
    plan = gpu_plan(spec, workers, CONTEXT, tuning=tuning, backend=gpu)
    with host_gpu("matrices.h"):
        backend = CudaBackend.load(spec, plan, checkpoint)
        out = DeviceMemory.of(np.zeros((steps(plan.ranks[0]), outputs(plan.ranks[0]), len(rows)), np.float32))
        launch, params = backend.prepare(Job((1,), 0, 1), backend.new_sequence(), logits_out=out.pointer)
        backend.kernel.stream.sync()  # it has cleared the exchange
        fill_exchange(backend, rows)
        HostKernel.schedule = schedule
        backend.launch(launch, params)
        assert backend.kernel.finished()
        backend.request_memory.status.finish = 2  # this kernel has no clerk to say that it has ended
        backend.close()
        return out.read(np.empty((steps(plan.ranks[0]), outputs(plan.ranks[0]), len(rows)), np.float32))


def steps(rank: GpuRank) -> int:
    return (len(rank.matrices) - 1) * rank.dimensions.layers + 1


def outputs(rank: GpuRank) -> int:
    return max(stage.tiles for stage in rank.matrices) * TILE_ROWS


@on_machines(
    "setup, count",
    [
        ("narrow", 2),
        ("narrow", 4),
        ("biases and two batches", 3),
        ("long tiles", 4),
        pytest.param("long tiles", 2, marks=pytest.mark.long),
    ],
    hip=(0, 4),  # a product of CDNA3 has columns for two rows
    fixture="gpu",
)
def test_a_row_has_the_bits_of_a_pass_of_its_own(gpu: str, setup: str, count: int, tmp_path: Path) -> None:
    folder = make_checkpoint(CASES[SETUPS[setup][0]], tmp_path)
    values = np.random.default_rng(count).standard_normal((count, 2048)).astype(np.float32)
    rows = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    alone = [products(folder, setup, row[None], SCHEDULES[0], gpu)[..., 0] for row in rows]
    for schedule in SCHEDULES:
        together = products(folder, setup, rows, schedule, gpu)
        for number, expected in enumerate(alone):
            np.testing.assert_array_equal(together[..., number], expected)
    assert (alone[0][:, :TILE_ROWS] != 0).all()  # of every stage
    assert (alone[0][:, :TILE_ROWS] != alone[1][:, :TILE_ROWS]).all()
