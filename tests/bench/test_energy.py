"""Joules a token by a stand-in for NVML: counted over whole requests, and missing with the reason."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import decode
import energy
from energy import Energy, EnergyCounter, NoCounter, energy_of
from monotape.backends.protocol import Backend
from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from shapes import SHAPES, RandomCheckpoint

ADDRESS = "00000000:8B:00.0"


class Nvml:
    """As much of the library as is called: one GPU, whose counter the test moves."""

    def __init__(self, **status: int) -> None:
        self.millijoules, self.status, self.asked = 5_000_000, status, ""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.status.get("init", 0)

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, handle: Any) -> int:  # noqa: N802
        self.asked = address.decode()
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p)).contents.value = 42
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any) -> int:  # noqa: N802
        assert handle.value == 42
        ctypes.cast(millijoules, ctypes.POINTER(ctypes.c_ulonglong)).contents.value = self.millijoules
        return self.status.get("energy", 0)

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0


def request_of(nvml: Nvml, time: list[float], tokens: int = 100, watts: float = 500.0) -> Callable[[], int]:
    """Takes half a second at so many watts."""

    def request() -> int:
        time[0] += 0.5
        nvml.millijoules += int(1e3 * 0.5 * watts)
        return tokens

    return request


def test_the_counter_is_that_of_the_gpu_in_use() -> None:
    nvml = Nvml()
    counter = EnergyCounter(ADDRESS, lambda name: nvml)
    assert nvml.asked == ADDRESS
    assert counter.joules() == 5000.0
    counter.close()


def test_joules_are_counted_over_requests_that_last_long_enough() -> None:
    nvml, time = Nvml(), [0.0]
    counter = EnergyCounter(ADDRESS, lambda name: nvml)
    found = energy_of(counter, request_of(nvml, time), lambda: time[0])
    assert found == Energy(500.0 * 0.5 / 100)
    assert time[0] == energy.LEAST_SECONDS


def gone(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (gone, r"libnvidia-ml\.so\.1 is not there"),
        (lambda name: Nvml(init=9), "nvmlInit_v2 failed with NVML's error 9"),
        (lambda name: Nvml(energy=3), "nvmlDeviceGetTotalEnergyConsumption failed with NVML's error 3"),
        (lambda name: SimpleNamespace(nvmlInit_v2=lambda: 0), "this NVML has no nvmlDeviceGetHandleByPciBusId_v2"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(load: Callable[[str], Any], why: str) -> None:
    with pytest.raises(NoCounter, match=why):
        EnergyCounter(ADDRESS, load)


def test_without_a_counter_the_reason_stands_there() -> None:
    never: Callable[[], int] = lambda: pytest.fail("nothing to run for")  # noqa: E731
    assert energy_of(NoCounter("no NVML"), never) == Energy(None, "no NVML")


def test_a_counter_that_stands_still_or_fails_is_no_figure() -> None:
    nvml, time = Nvml(), [0.0]
    counter = EnergyCounter(ADDRESS, lambda name: nvml)
    found = energy_of(counter, request_of(nvml, time, watts=0), lambda: time[0])
    assert found == Energy(None, "the GPU's counter of energy stands still")
    nvml.status["energy"] = 15
    found = energy_of(counter, request_of(nvml, time), lambda: time[0])
    assert found.joules_per_token is None and "error 15" in found.missing


TINY = {
    **SHAPES["llama-3.1-8b"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 77,
}  # fmt: skip


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return load_backend(
        "reference", spec_from_config(TINY), RandomCheckpoint("tiny"), dtype="f32", context=32, workers=None
    )


def test_a_row_of_a_decode_report_has_joules_beside_its_speed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml()
    monkeypatch.setattr(energy, "LEAST_SECONDS", 0.0001)
    run = decode.run_request

    def drawing(*arguments: Any) -> Any:
        nvml.millijoules += 300
        return run(*arguments)

    monkeypatch.setattr(decode, "run_request", drawing)
    counter = EnergyCounter(ADDRESS, lambda name: nvml)
    row = decode.row(decode.measure(backend, counter, 5, 4, 2), 1e9, None)
    assert row["joules_per_token"] == pytest.approx(0.3 / 4)
    assert row["tokens_per_second"]["runs"] == 2
    assert "joules_missing" not in row


def test_a_row_without_joules_says_why(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    counter = energy.open_counter(backend.name)
    row = decode.row(decode.measure(backend, counter, 5, 4, 1), 1e9, None)  # type: ignore[arg-type]
    assert (row["joules_per_token"], row["joules_missing"]) == (None, "energy is counted on GPUs alone")
    decode.print_table([row], {}, 1e9)
    assert "millijoules" not in capsys.readouterr().out
