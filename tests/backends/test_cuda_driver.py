"""The host side of the GPU on a fake one: memory, launches, refusals, and the cache of compiled kernels."""

from __future__ import annotations

import ctypes
import errno
import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.fake_cuda import CUDAError, FakeCuda, fake_gpu
from monotape.backends.cuda import compilation, detection, driver
from monotape.backends.cuda.params import ParamsStruct
from monotape.errors import BackendError, BackendUnavailable, ResourceError


def test_memory_holds_what_was_written() -> None:
    with fake_gpu(FakeCuda()):
        memory = driver.DeviceMemory(100)
        memory.fill(7)
        memory.write(np.arange(5, dtype=np.int32), 40)
        found = memory.read(np.empty(100, np.uint8))
        assert (found[:40] == 7).all() and (found[60:] == 7).all()
        assert found[40:60].view(np.int32).tolist() == [0, 1, 2, 3, 4]


def test_a_write_past_the_end_is_our_mistake() -> None:
    with fake_gpu(FakeCuda()):
        memory = driver.DeviceMemory(16)
        with pytest.raises(AssertionError, match="8 bytes at 12 of 16"):
            memory.write(np.zeros(8, np.uint8), 12)


def test_rows_that_do_not_follow_each_other_are_written_in_order() -> None:
    with fake_gpu(FakeCuda()):
        array = np.arange(24, dtype=np.uint8).reshape(4, 6)[:, ::2]
        assert driver.DeviceMemory.of(array).read(np.empty(array.shape, np.uint8)).tolist() == array.tolist()


def test_rows_move_to_another_step() -> None:
    with fake_gpu(FakeCuda()):
        source, target = driver.DeviceMemory.of(np.arange(12, dtype=np.uint8)), driver.DeviceMemory(20)
        target.fill(0)
        target.copy_rows(source, 4, 7, 4, 3)
        found = target.read(np.empty(20, np.uint8))
        assert found.tolist() == [0, 1, 2, 3, 0, 0, 0, 4, 5, 6, 7, 0, 0, 0, 8, 9, 10, 11, 0, 0]


def test_memory_frees_itself() -> None:
    with fake_gpu(FakeCuda()) as gpu:
        memory, pinned = driver.DeviceMemory(1000), driver.PinnedMemory(500)
        assert gpu.used == 1500
        assert (pinned.view == 0).all() and pinned.view.ctypes.data == pinned.pointer
        memory.close()
        memory.close()
        assert gpu.used == 500
        del memory, pinned
        gc.collect()
        assert gpu.used == 0


def test_too_little_memory_is_an_error_with_a_hint() -> None:
    with (
        fake_gpu(FakeCuda(memory=1000)),
        pytest.raises(ResourceError, match=r"too little free memory.*--max-model-len"),
    ):
        driver.DeviceMemory(1001)


def test_too_little_memory_is_the_same_error_from_every_layer_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_gpu(FakeCuda()) as gpu, monkeypatch.context() as patch:
        kernel = driver.Kernel(b"cubin", "some_kernel", 200_000)
        full = SimpleNamespace(**vars(gpu.bindings))
        patch.setattr(driver, "_bindings", lambda: full)
        for name in ("CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory"):
            full.cuFuncLoad = lambda _, name=name: (Status(name),)
            with pytest.raises(ResourceError, match=r"too little free memory.*--max-model-len"):
                kernel.load_now()
        full.cuFuncLoad = lambda _: (Status("CUDA_ERROR_INVALID_IMAGE"),)
        with pytest.raises(BackendError, match=r"CUDA driver says CUDA_ERROR_INVALID_IMAGE.*doctor"):
            kernel.load_now()


def test_memory_is_freed_after_a_fault_and_the_fault_is_not_reported_again() -> None:
    with fake_gpu(FakeCuda(devices=2)) as gpu:
        with driver.on_device(1):
            memories = [driver.DeviceMemory(100), driver.PinnedMemory(100), driver.DeviceMemory(100)]
        gpu.fault = "CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel, ..."
        for memory in memories:
            memory.close()
        assert gpu.used == 0


def test_free_and_total_memory() -> None:
    with fake_gpu(FakeCuda(memory=1000)):
        kept = driver.DeviceMemory(100)
        assert driver.memory_free_and_total() == (900, 1000)
        kept.close()


def test_every_thread_gets_the_context() -> None:
    with fake_gpu(FakeCuda()):
        driver.new_stream()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(driver.new_stream()))
        thread.start()
        thread.join()
        assert found


class Status(int):
    """A CUresult that is no success, with its name."""

    def __new__(cls, name: str) -> Status:
        status = super().__new__(cls, 1)
        status.name = name
        return status

    name: str


class Parameters(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("numbers", ctypes.c_int64 * 50), ("last", ctypes.c_int32))


def test_a_launch_hands_over_the_whole_structure() -> None:
    with fake_gpu(FakeCuda()) as gpu:
        kernel = driver.Kernel(b"cubin", "some_kernel", 200_000)
        assert gpu.attributes == [("shared", 200_000, 11, 0)]
        assert kernel.finished()
        parameters = Parameters(pointer=1234, last=-5)
        kernel.launch(132, 288, parameters)
        kernel.launch(131, 288, parameters)
        function, *shape, stream, address = gpu.launched[0]
        assert (function, shape, stream) == (11, [132, 1, 1, 288, 1, 1, 200_000], kernel.stream.handle)
        assert Parameters.from_address(address).last == -5
        assert kernel.launches == 2
        kernel.wait()
        assert kernel.finished()


def test_a_launch_may_be_told_in_constant_memory() -> None:
    with fake_gpu(FakeCuda()) as gpu:
        kernel = driver.Kernel(b"cubin", "some_kernel", 200_000, "some_variable")
        for context in (3, 4):
            kernel.launch(132, 288, ParamsStruct(prompt_length=context))
            *_, address = gpu.launched[-1]
            assert address == gpu.told
            assert ParamsStruct.from_address(address).prompt_length == context
        with pytest.raises(AssertionError, match="bytes for"):
            kernel.launch(132, 288, Parameters())


def test_a_fault_of_the_kernel_carries_the_drivers_name_for_it() -> None:
    with pytest.raises(BackendError, match="The CUDA driver says CUDA_ERROR_ILLEGAL_ADDRESS"):  # noqa: SIM117
        with driver.driver_errors():
            raise CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel, ...")


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), driver.driver_errors():
        1 / 0  # noqa: B018


def test_the_device_by_name_and_size() -> None:
    with fake_gpu(FakeCuda()):
        assert (driver.device_name(), driver.processors()) == ("NVIDIA H200", 5)


def test_another_gpu_is_refused_by_name() -> None:
    with (
        fake_gpu(FakeCuda("NVIDIA GeForce RTX 4090", (8, 9))),
        pytest.raises(BackendUnavailable, match=r"GPU is a NVIDIA GeForce RTX 4090;.*Hopper"),
    ):
        driver.device()


def test_no_driver_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(index: int) -> None:
        raise RuntimeError("libcuda is not there")

    with fake_gpu(FakeCuda()) as gpu:
        monkeypatch.setattr(gpu, "Device", missing)
        with pytest.raises(BackendUnavailable, match=r"No NVIDIA GPU.*--backend cpu"):
            driver.device()


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'monotape\[cuda\]'"):
        compilation.cuda_core()


class Driver:
    """libcuda.so.1, as far as detection.py calls it."""

    def __init__(self, capability: tuple[int, int] = (9, 0), devices: int = 1) -> None:
        self.numbers = dict(zip((75, 76), capability, strict=True))
        self.devices = devices
        self.contexts: list[int] = []

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.contexts.append(device.value)
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return 0 if index < self.devices else 101

    def cuDeviceGetName(self, name: Any, count: int, device: Any) -> int:  # noqa: N802
        name.value = b"NVIDIA Something"
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:  # noqa: N802
        number._obj.value = self.numbers[attribute]
        return 0


@pytest.fixture
def detected(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_up(library: Driver | None) -> None:
        def load(name: str) -> Driver:
            if library is None:
                raise OSError(name)
            return library

        monkeypatch.setattr(detection.ctypes, "CDLL", load)
        forget()

    def forget() -> None:
        detection.find_gpu.cache_clear()
        detection.wake_gpu.cache_clear()

    yield set_up
    forget()


def test_a_hopper_with_its_packages_is_taken(detected: Any) -> None:
    detected(Driver())
    assert detection.find_gpu() == detection.Gpu("NVIDIA Something", (9, 0))
    assert detection.why_not() is None


@pytest.mark.parametrize("library", [None, Driver(devices=0)])
def test_no_gpu_is_no_reason_to_talk(detected: Any, library: Driver | None) -> None:
    detected(library)
    assert detection.why_not() == ""


def test_a_gpu_of_another_kind_is_named(detected: Any) -> None:
    detected(Driver((10, 0)))
    assert detection.why_not() == (
        "The GPU is a NVIDIA Something; the CUDA backend is written for Hopper (H100, H200)."
    )


def test_a_hopper_without_its_packages_says_which(detected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    detected(Driver())
    monkeypatch.setattr(detection, "_importable", lambda module: module != "cuda.core")
    assert detection.why_not() == "The GPU is a NVIDIA Something, but these packages are missing: cuda-core."


def test_a_hopper_is_woken_once(detected: Any) -> None:
    library = Driver()
    detected(library)
    for _ in range(2):
        detection.wake_gpu().join()
    assert library.contexts == [0]


@pytest.mark.parametrize("library", [Driver((10, 0)), Driver(devices=0), None])
def test_nothing_else_is_woken(detected: Any, library: Driver | None) -> None:
    detected(library)
    detection.wake_gpu().join()
    assert library is None or library.contexts == []


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a kernel of its own, and an empty cache."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "small.h").write_text("#pragma once\nconstexpr int kOne = 1;\n")
    body = (
        '#include "plan.h"\n#include "small.h"\nextern "C" __global__ void f(int* x) { *x = kOne + kTwo; }\n'
    )
    (folder / "monotape.cu").write_text(body)
    monkeypatch.setattr(compilation, "KERNELS", folder)
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "cache"))
    return folder


def test_a_kernel_is_compiled_once(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = driver.compile_kernel("constexpr int kTwo = 2;")
    monkeypatch.setattr(compilation, "_compile", lambda header, source: pytest.fail("compiled again"))
    assert driver.compile_kernel("constexpr int kTwo = 2;") == first
    assert [path.suffix for path in (kernels.parent / "cache" / "cubin").iterdir()] == [".cubin"]


@pytest.mark.parametrize("obstacle", ["no folder", "a full disk"])
def test_a_kernel_that_cannot_be_kept_is_used_all_the_same(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache" / "cubin"
    if obstacle == "no folder":
        (tmp_path / "cache").write_text("a file")
    else:
        write = Path.write_bytes

        def fill(path: Path, data: bytes) -> int:
            write(path, data[:2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", fill)
    for number in range(2):
        path = folder / f"{number}.cubin"
        assert compilation.kept_code(path, lambda: b"machine code") == b"machine code"
    assert not folder.is_dir() or list(folder.iterdir()) == []
    (warning,) = caplog.messages
    assert f"cannot be kept in {folder} (" in warning and "MONOTAPE_CACHE" in warning


def test_the_cache_is_keyed_by_contents(kernels: Path) -> None:
    names = {compilation.cached_path("a"), compilation.cached_path("b")}
    (kernels / "small.h").write_text("changed")
    names.add(compilation.cached_path("a"))
    (kernels / "monotape.cu").write_text("changed")
    names.add(compilation.cached_path("a"))
    assert len(names) == 4
    (kernels / "other.cu").write_text("another kernel's body")
    assert compilation.cached_path("a") in names


def test_what_does_not_compile_says_where(kernels: Path) -> None:
    (kernels / "small.h").write_text("nonsense here;")
    with pytest.raises(BackendError, match=r"(?s)does not compile.*small\.h.*nonsense"):
        driver.compile_kernel("")


def test_registers_and_stack_are_read_off_the_cubin(kernels: Path) -> None:
    (kernels / "monotape.cu").write_text(
        'extern "C" __global__ void f(int* x, int n) { int local[64]; for (int i = 0; i < 64; ++i) local[i] = x[i];'
        " for (int i = 0; i < n; ++i) local[x[i]] += local[x[i + 1]]; x[0] = local[n]; }"
    )
    usage = driver.resource_usage(driver.compile_kernel(""))
    assert usage.registers > 0 and usage.stack_bytes >= 256
