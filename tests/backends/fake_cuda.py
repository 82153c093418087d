"""A GPU made of host memory: as much of cuda-core as the CUDA backend calls, so that its host side runs anywhere.

Copies and fills wait on their stream until it is synchronised, as late as the real driver may run them, so code
that forgets to wait reads wrong bytes here too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import pytest

from backends.guarded_memory import GuardedMemory
from monotape.backends.cuda import driver
from monotape.backends.cuda.params import ParamsStruct


class CUDAError(Exception):
    """Named as cuda-core names its own."""


@dataclass
class Event:
    stream: Stream | None = None
    count: int = 0

    def sync(self) -> None:
        if self.stream is not None:
            self.stream.run(self.count)

    @property
    def is_done(self) -> bool:
        self.sync()
        return True


@dataclass
class Stream:
    work: list[Callable[[], Any]] = field(default_factory=list)
    done: int = 0
    handle: int = 7
    lock: Any = field(default_factory=threading.RLock)

    def run(self, count: int) -> None:
        with self.lock:
            while self.done < count:
                self.work[self.done]()
                self.work[self.done] = lambda: None
                self.done += 1

    def sync(self) -> None:
        self.run(len(self.work))

    def record(self, event: Event) -> None:
        event.stream, event.count = self, len(self.work)


class Buffer:
    def __init__(self, handle: int, size: int, close: Callable[[], None] = lambda: None) -> None:
        self.handle, self.size, self.close = handle, size, close

    @staticmethod
    def from_handle(handle: int, size: int) -> Buffer:
        return Buffer(handle, size)

    def copy_from(self, source: Buffer, *, stream: Stream) -> None:
        assert self.size == source.size, "cuda-core refuses copies between buffers of two sizes"
        stream.work.append(lambda: ctypes.memmove(self.handle, source.handle, self.size))

    def fill(self, value: int, *, stream: Stream) -> None:
        stream.work.append(lambda: ctypes.memset(self.handle, value, self.size))


class FakeCuda:
    """Takes the place of the module cuda.core."""

    Buffer = Buffer
    #: Of all GPUs, by its address. What a test leaves behind goes with its GPU.
    device_memory: ClassVar[WeakValueDictionary[int, GuardedMemory]] = WeakValueDictionary()

    def __init__(
        self, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), memory: int = 1 << 30,
        devices: int = 1, strangers: tuple[tuple[int, int], ...] = (),
    ) -> None:  # fmt: skip
        """`strangers`: pairs of GPUs of which the first cannot reach the second's memory."""
        self.name, self.capability, self.memory = name, capability, memory
        self.devices, self.strangers = devices, strangers
        self.Device: Any = lambda index: self._device(index)
        self.Device.get_all_devices = lambda: [self._device(index) for index in range(devices)]
        self.used = 0
        self.fault: str | None = None  # that a kernel has met: from then on calls fail
        self.kept: dict[int, Any] = {}
        self.device_of: dict[int, int] = {}  # of memory, by its address
        self.pools: dict[int, Any] = {}
        self.current = threading.local()
        self.launched: list[tuple[Any, ...]] = []
        self.loaded: list[tuple[int, Any]] = []  # the GPU that was current, and the function
        self.attributes: list[tuple[Any, ...]] = []
        self._constant = ParamsStruct()  # what kernels have in constant memory
        self.told = ctypes.addressof(self._constant)

    def _device(self, index: int) -> Any:
        assert 0 <= index < self.devices
        return SimpleNamespace(
            device_id=index,
            can_access_peer=lambda other: (index, other.device_id) not in self.strangers,
            name=self.name,
            compute_capability=self.capability,
            properties=SimpleNamespace(multiprocessor_count=5),
            set_current=lambda: (setattr(self.current, "ready", True), setattr(self.current, "index", index)),
            create_stream=lambda: self._needs_context(Stream),
            create_event=lambda: self._needs_context(Event),
            sync=self._raise_fault,
        )

    def _raise_fault(self) -> None:
        if self.fault is not None:
            raise CUDAError(self.fault)

    def _needs_context(self, make: Callable[[], Any]) -> Any:
        assert getattr(self.current, "ready", False), "no context is current in this thread"
        return make()

    def DeviceMemoryResourceOptions(self) -> None:  # noqa: N802
        return None

    def DeviceMemoryResource(self, device: Any, options: Any) -> Any:  # noqa: N802
        attributes = SimpleNamespace(reserved_mem_current=0, used_mem_current=0)

        def allocate(size: int, *, stream: Any) -> Buffer:
            buffer = self._allocate(size, stream=stream)
            self.device_of[buffer.handle] = device.device_id
            FakeCuda.device_memory[buffer.handle] = self.kept[buffer.handle]
            return buffer

        pool = SimpleNamespace(allocate=allocate, attributes=attributes, peer_accessible_by=())
        self.pools[device.device_id] = pool
        return pool

    def LegacyPinnedMemoryResource(self) -> Any:  # noqa: N802
        return SimpleNamespace(allocate=lambda size: self._allocate(size, stream=None))

    def _allocate(self, size: int, *, stream: Any) -> Buffer:
        if self.used + size > self.memory:
            raise CUDAError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed ...")
        memory = GuardedMemory(size)
        address = memory.address
        ctypes.memset(address, 0xA5, size)  # new memory need not be zero
        self.kept[address] = memory
        self.used += size
        return Buffer(address, size, lambda: self._free(address, size))

    def _free(self, address: int, size: int) -> None:
        FakeCuda.device_memory.pop(address, None)
        self.kept.pop(address).close()
        self.used -= size
        self._raise_fault()

    @property
    def ObjectCode(self) -> Any:  # noqa: N802
        kernel = SimpleNamespace(handle=11)
        return SimpleNamespace(
            from_cubin=lambda cubin: SimpleNamespace(handle=12, get_kernel=lambda name: kernel)
        )

    @property
    def bindings(self) -> Any:
        """Takes the place of cuda.bindings.driver."""

        def launch(*arguments: Any) -> tuple[int]:
            pointers = ctypes.cast(arguments[-1] or None, ctypes.POINTER(ctypes.c_void_p))
            self.launched.append((*arguments[:-1], pointers[0] if pointers else self.told))
            return (0,)

        def tell(place: int, source: int, size: int, stream: Any) -> tuple[int]:
            ctypes.memmove(place, source, size)
            return (0,)

        def load(function: Any) -> tuple[int]:
            self.loaded.append((self.current.index, function))
            return (0,)

        def set_attribute(*arguments: Any) -> tuple[int]:
            self.attributes.append(arguments)
            return (0,)

        def copy_rows(copy: Any, stream: Any) -> tuple[int]:
            for row in range(copy.Height):
                target, source = copy.dstDevice + row * copy.dstPitch, copy.srcDevice + row * copy.srcPitch
                ctypes.memmove(target, source, copy.WidthInBytes)
            return (0,)

        return SimpleNamespace(
            CUDA_MEMCPY2D=SimpleNamespace, CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_DEVICE=2),
            cuMemcpy2DAsync=copy_rows, CUlibrary=int, cuMemcpyHtoDAsync=tell,
            cuLibraryGetGlobal=lambda library, name: (0, self.told, ctypes.sizeof(ParamsStruct)),
            CUkernel=int, CUfunction=int, cuMemGetInfo=lambda: (0, self.memory - self.used, self.memory),
            cuLaunchCooperativeKernel=launch, cuKernelSetAttribute=set_attribute,
            cuKernelGetFunction=lambda kernel: (0, kernel), cuFuncLoad=load,
            CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"),
        )  # fmt: skip


@contextmanager
def fake_gpu(gpu: FakeCuda) -> Iterator[FakeCuda]:
    """Runs the CUDA backend's host side on `gpu`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "cuda_core", lambda: gpu)
        patch.setattr(driver, "_bindings", lambda: gpu.bindings)
        patch.setattr(driver, "_thread", threading.local())
        _forget()
        try:
            yield gpu
        finally:
            _forget()


def _forget() -> None:
    for cached in (driver._require_hopper, driver._pool_of, driver._memory_stream_of):
        cached.cache_clear()
