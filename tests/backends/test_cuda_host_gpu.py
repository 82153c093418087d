"""The host side on a real GPU: memory, loading and the bandwidth kernel, which the other tests run on a fake one."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from backends.test_cuda_loading import STORED, check, gpu_plan, read
from families import BY_NAME, make_checkpoint
from monotape.backends.cuda import driver
from monotape.backends.cuda.bandwidth import measure_bandwidth
from monotape.backends.cuda.detection import find_gpu, why_not
from monotape.backends.cuda.loading import load_model
from monotape.errors import ResourceError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.open import open_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
]


def test_the_driver_and_cuda_core_see_the_same_gpu() -> None:
    gpu = find_gpu()
    assert gpu is not None
    assert driver.device_name() == gpu.name
    free, total = driver.memory_free_and_total()
    assert 0 < free <= total


def test_memory_holds_what_was_written_and_is_given_back() -> None:
    before = driver.memory_free_and_total()[0]
    for _ in range(20):
        memory, pinned = driver.DeviceMemory(1 << 30), driver.PinnedMemory(1000)
        pinned.view[:] = np.arange(1000) % 251
        memory.fill(9)
        stream = driver.new_stream()
        memory.copy_in(pinned.pointer, 1000, 5, stream)
        stream.sync()
        found = memory.read(np.empty(1010, np.uint8))
        assert (
            (found[:5] == 9).all()
            and np.array_equal(found[5:1005], pinned.view)
            and (found[1005:] == 9).all()
        )
    other = driver.DeviceMemory(4000)
    other.fill(0)
    other.copy_rows(memory, 100, 400, 60, 10)
    moved = other.read(np.empty(4000, np.uint8)).reshape(10, 400)
    assert np.array_equal(moved[:, :60], found[:1000].reshape(10, 100)[:, :60]) and not moved[:, 60:].any()
    del memory, pinned, other
    gc.collect()
    assert driver.memory_free_and_total()[0] >= before - (256 << 20)


def test_more_memory_than_there_is_is_refused_and_the_process_goes_on() -> None:
    with pytest.raises(ResourceError):
        driver.DeviceMemory(driver.memory_free_and_total()[1] * 2)
    driver.DeviceMemory(1000).fill(1)


@pytest.mark.parametrize("fmt", STORED)
@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3"])
def test_every_row_lands_where_the_plan_says(tmp_path: Path, case: str, fmt: Format) -> None:
    checkpoint = open_checkpoint(make_checkpoint(BY_NAME[case], tmp_path, STORED[fmt]))
    spec = spec_from_config(checkpoint.config)
    plan = gpu_plan(spec, fmt)
    loaded = load_model(spec, plan, checkpoint)
    check(loaded, spec, plan, checkpoint, rtol=0)
    assert read(loaded, "tape_start", np.int64, 1)[0] == 0


def test_the_bandwidth_is_that_of_a_memory() -> None:
    """Between a desktop's and ten times an H200's: the clock, the bytes and the kernel are in the same units."""
    assert 5e10 < measure_bandwidth() < 5e13
