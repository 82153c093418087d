"""The energy of a GPU: joules by NVML's counter, over a time that is long compared with the counter's steps."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
#: The counter moves in steps of up to a tenth of a second: a stretch this long is right to a few percent.
LEAST_SECONDS = 2.0


class NoCounter(Exception):
    """There is no NVML here, or its GPU does not count."""


def _load(name: str) -> Any:
    return ctypes.CDLL(name)


class EnergyCounter:
    """Joules that the GPU with this PCI address has taken since its driver was loaded."""

    def __init__(self, pci_bus_id: str, load: Callable[[str], Any] = _load) -> None:
        try:
            self._nvml = load(LIBRARY)
        except OSError as error:
            raise NoCounter(f"{LIBRARY} is not there") from error
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.encode(), ctypes.byref(self._device))
        self.joules()  # a GPU that does not count says so now

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def close(self) -> None:
        self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise NoCounter(f"this NVML has no {name}")
        status = function(*arguments)
        if status:
            raise NoCounter(f"{name} failed with NVML's error {status}")


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules a token, or why there are none."""

    joules_per_token: float | None
    missing: str = ""


def energy_of(
    counter: EnergyCounter | NoCounter,
    request: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
) -> Energy:
    """Repeats a request, which returns its tokens, and divides what the GPU took by all of them."""
    if isinstance(counter, NoCounter):
        return Energy(None, str(counter))
    try:
        start, before, tokens = clock(), counter.joules(), 0
        while clock() - start < LEAST_SECONDS:
            tokens += request()
        taken = counter.joules() - before
    except NoCounter as error:
        return Energy(None, str(error))
    if taken <= 0:
        return Energy(None, "the GPU's counter of energy stands still")
    return Energy(taken / tokens)


def open_counter(backend_name: str) -> EnergyCounter | NoCounter:
    """That of the GPU in use; where there is none, the reason."""
    if backend_name != "cuda":
        return NoCounter("energy is counted on GPUs alone")
    from monotape.backends.cuda.driver import device

    try:
        return EnergyCounter(str(device().pci_bus_id))
    except NoCounter as error:
        return error
