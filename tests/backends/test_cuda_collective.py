"""The kernel that times sums over ranks, without a GPU: it compiles, and its times and results are read right."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from monotape.backends.cuda import collective, driver
from monotape.backends.cuda.collective import Collective, CollectiveStruct
from monotape.errors import BackendError


@pytest.mark.parametrize("ranks", [2, 8])
def test_it_compiles_without_spilling(ranks: int) -> None:
    usage = driver.resource_usage(driver.compile_kernel(collective.header(ranks), "collective.cu"))
    assert usage.stack_bytes == 0


class SummingGpu(FakeCuda):
    """Rank r's block takes 100 + r ticks a round, of half a nanosecond; sums are right, or one of them is not."""

    wrong = failed = False

    @property
    def bindings(self) -> Any:
        real = super().bindings
        launch = real.cuLaunchCooperativeKernel

        def run(*arguments: Any) -> Any:
            result, total = launch(*arguments), arguments[1]
            params = CollectiveStruct.from_address(self.launched[-1][-1])
            ranks = total // params.blocks
            lengths = 100 + np.arange(total, dtype=np.int64) // params.blocks
            ticks = lengths[:, None] * np.arange(params.rounds + 1, dtype=np.int64)[None, :] + 7
            times = np.stack([np.zeros(total, np.int64), lengths * params.rounds // 2], axis=1)
            sums = collective.expected_sums(ranks, params.elements)
            sums[-1, -1] += self.wrong
            for at, array in ((params.ticks, ticks), (params.times_ns, times), (params.sums, sums)):
                contiguous = np.ascontiguousarray(array)
                ctypes.memmove(at, contiguous.ctypes.data, contiguous.nbytes)
            ctypes.c_uint32.from_address(params.failed).value = self.failed
            return result

        real.cuLaunchCooperativeKernel = run
        return real


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(collective, "compile_kernel", lambda header, source: b"")
    with fake_gpu(SummingGpu()) as made:
        yield made


def test_a_round_is_as_long_as_the_slowest_block(gpu: SummingGpu) -> None:
    times = Collective(5).sum(3, rounds=20)  # five processors: one a rank
    assert times.microseconds.shape == (20,)
    assert times.percentile(50) == pytest.approx(0.5 * 104 / 1e3)
    assert Collective(5).barrier(rounds=20).percentile(99) == pytest.approx(0.5 * 104 / 1e3)
    assert gpu.used == 0


@pytest.mark.parametrize(("field", "message"), [("wrong", "sum over ranks is wrong"), ("failed", "too long")])
def test_what_goes_wrong_is_an_error(gpu: SummingGpu, field: str, message: str) -> None:
    setattr(gpu, field, True)
    with pytest.raises(BackendError, match=message):
        Collective(2).sum(9, rounds=20)
    assert gpu.used == 0


def test_sums_are_means_of_what_ranks_start_from() -> None:
    assert collective.expected_sums(4, 3).tolist() == [[2.5, 3.5, 4.5]] * 4
