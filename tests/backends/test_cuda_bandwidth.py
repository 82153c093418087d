"""The bandwidth kernel without a GPU: it compiles, is launched with what it expects, and its times are read right."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from monotape.backends.cuda import bandwidth, driver
from monotape.errors import BackendUnavailable


def test_it_compiles_without_spilling() -> None:
    usage = driver.resource_usage(driver.compile_kernel(bandwidth.HEADER, "bandwidth.cu"))
    assert usage.stack_bytes == 0


def test_every_ring_fits_and_holds_enough() -> None:
    text = (driver.KERNELS / "bandwidth.cu").read_text()
    most = int(text.split("kMostPages = ")[1].split(";")[0])
    for size, pages in bandwidth.SHAPES:
        assert 64 << 10 <= size * pages <= 224 << 10
        assert pages <= most and size % 128 == 0


class TimedGpu(FakeCuda):
    """A launch of block b starts at 1000 + b ns and ends `seconds[i]` later."""

    def __init__(self, durations_ns: list[int]) -> None:
        super().__init__()
        self.durations = durations_ns
        self.seen: list[bandwidth.BandwidthStruct] = []

    @property
    def bindings(self) -> Any:
        real = super().bindings
        launch = real.cuLaunchCooperativeKernel

        def timed(*arguments: Any) -> Any:
            result = launch(*arguments)
            params = bandwidth.BandwidthStruct.from_address(self.launched[-1][-1])
            self.seen.append(bandwidth.BandwidthStruct.from_buffer_copy(params))
            starts = 1000 + np.arange(arguments[1], dtype=np.int64)
            ends = starts + self.durations[(len(self.seen) - 1) % len(self.durations)]
            moments = np.stack([starts, ends], axis=1)
            ctypes.memmove(params.times_ns, moments.ctypes.data, moments.nbytes)
            return result

        real.cuLaunchCooperativeKernel = timed
        return real


def test_the_best_launch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "compile_kernel", lambda header, source: b"")
    with fake_gpu(TimedGpu([9_996, 1_996, 4_996])) as gpu:
        found = bandwidth.measure_bandwidth(5 << 20)
        assert isinstance(gpu, TimedGpu)
        assert len(gpu.seen) == bandwidth.REPEATS * len(bandwidth.SHAPES)
        assert found == 2 * (5 << 20) / 2000e-9  # five blocks: the last starts 4 ns after the first
        assert {(item.page_bytes, item.pages) for item in gpu.seen} == set(bandwidth.SHAPES)
        assert gpu.used == 0


def test_a_figure_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda: 4.5e12)
    with fake_gpu(FakeCuda()):
        assert bandwidth.known_bandwidth() == 4.5e12
        monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda: pytest.fail("measured again"))
        assert bandwidth.known_bandwidth() == 4.5e12
    assert [path.name for path in tmp_path.iterdir()] == ["bandwidth-nvidia-h200.json"]


def test_without_a_gpu_there_is_no_figure() -> None:
    with fake_gpu(FakeCuda(capability=(8, 0))), pytest.raises(BackendUnavailable):
        bandwidth.known_bandwidth()
