"""Is there a GPU that the kernel runs on? Asked of the driver itself, so that a machine without one loses no time."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from dataclasses import dataclass
from functools import cache

HOPPER = (9, 0)  # the compute capability that sm_90a code runs on, and on no other
_LIBRARY = "libcuda.so.1"
# Kernels of several ranks wait for each other, so their streams must not share one of the few queues that a GPU has by
# default. The driver reads this when it starts, at the first call of any kind.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU of this machine."""

    name: str
    capability: tuple[int, int]


@cache
def find_gpu() -> Gpu | None:
    """None where there is no driver or no device. Neither cuda-core nor anything else is imported."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return _first_gpu(driver)


def _first_gpu(driver: ctypes.CDLL) -> Gpu | None:
    device = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    name = ctypes.create_string_buffer(_NAME_BYTES)
    numbers = (ctypes.c_int(), ctypes.c_int())
    if driver.cuDeviceGetName(name, _NAME_BYTES, device):
        return None
    for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
    return Gpu(name.value.decode(errors="replace"), (numbers[0].value, numbers[1].value))


@cache
def wake_gpu() -> threading.Thread:
    """Has the driver create the GPU's context in a thread: it takes half a second and does not hold Python's lock.

    The first later use finds the context, or waits for it. An error here happens again there, where it is reported. The
    thread is no daemon: a process must not end while the driver starts.
    """
    thread = threading.Thread(target=_make_context, name="wake-gpu")
    thread.start()
    return thread


def _make_context() -> None:
    if why_not() is not None:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL(_LIBRARY)
        if not driver.cuDeviceGet(ctypes.byref(device), 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def why_not() -> str | None:
    """Why the CUDA backend cannot run here, in one sentence; None where it can. "" where there is no GPU at all."""
    gpu = find_gpu()
    if gpu is None:
        return ""
    if gpu.capability != HOPPER:
        return f"The GPU is a {gpu.name}; the CUDA backend is written for Hopper (H100, H200)."
    if missing_packages():
        return f"The GPU is a {gpu.name}, but these packages are missing: {', '.join(missing_packages())}."
    return None


def missing_packages() -> tuple[str, ...]:
    """What `pip install 'monotape[cuda]'` would add."""
    return tuple(
        package
        for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings"))
        if not _importable(module)
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False
