"""The GPU through cuda-core, as much of it as we need: memory that frees itself, and one cooperative launch.

cuda.bindings, the driver's own calls, does the few things that cuda-core 1.x does not offer; each place says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.compilation import (
    KERNELS,
    ResourceUsage,
    compile_kernel,
    cuda_core,
    is_cuda_error,
    resource_usage,
)
from monotape.backends.cuda.detection import HOPPER
from monotape.errors import BackendError, BackendUnavailable, MonotapeError, ResourceError

__all__ = [
    "KERNELS", "DeviceMemory", "Kernel", "PinnedMemory", "ResourceUsage", "allow_peers", "can_reach", "compile_kernel",
    "device", "device_count", "device_index", "device_name", "driver_errors", "memory_free_and_total", "new_event",
    "new_stream", "on_device", "processors", "resource_usage", "use_runtime",
]  # fmt: skip
_thread = threading.local()
#: The runtime of another vendor's GPUs: backends/hip/runtime.py offers the calls of cuda-core that are made here.
_other: Any = None


def use_runtime(runtime: Any) -> None:
    """From here on all GPUs of this process are those of `runtime`; None: NVIDIA's."""
    global _other
    if runtime is _other:
        return
    _other, _thread.current = runtime, None
    for cached in (_pool_of, _memory_stream_of):
        cached.cache_clear()


def _core() -> Any:
    return cuda_core() if _other is None else _other


def _driver_name() -> str:
    return "CUDA driver" if _other is None else str(_other.name)


def _is_driver_error(error: BaseException) -> bool:
    return is_cuda_error(error) if _other is None else isinstance(error, _other.Error)


@contextlib.contextmanager
def driver_errors() -> Iterator[None]:
    """Turns an error of the driver into one of ours, with the driver's own name for it."""
    try:
        yield
    except Exception as error:
        if not _is_driver_error(error):
            raise
        raise _error_of(str(error).split(":")[0].strip()) from error


def _error_of(name: str) -> MonotapeError:
    """Our error for the driver's, which is CUDA_ERROR_OUT_OF_MEMORY or hipErrorOutOfMemory where memory is short."""
    if "outofmemory" in name.replace("_", "").lower():
        return ResourceError("The GPU has too little free memory.", "Use a smaller model or --max-model-len.")
    return BackendError(f"The {_driver_name()} says {name}.", "Run `monotape doctor`.")


def _bindings() -> Any:
    if _other is not None:
        return _other.bindings
    cuda_core()  # says what is missing when nothing is installed
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a call of cuda.bindings."""
    status, *values = result
    if int(status) == 0:
        return values[0] if len(values) == 1 else tuple(values)
    raise _error_of(str(getattr(status, "name", status)))


def device_index() -> int:
    """Which GPU this thread works on; the first, unless `on_device` says otherwise."""
    return getattr(_thread, "index", 0)


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Selects another GPU for this thread inside the `with` block."""
    before = device_index()
    _thread.index = index
    try:
        yield
    finally:
        _thread.index = before


def device() -> Any:
    """This thread's GPU, its context made current. Anything but a Hopper is refused."""
    index = device_index()
    (_require_hopper if _other is None else _other.require)(index)
    gpu = _core().Device(index)
    if getattr(_thread, "current", None) != index:
        with driver_errors():
            gpu.set_current()
        _thread.current = index
    return gpu


def device_count() -> int:
    """GPUs of this machine; 0 where there is no driver."""
    try:
        return len(_core().Device.get_all_devices())
    except BackendUnavailable:
        raise
    except Exception:  # no driver at all: each layer has its own exception for that
        return 0


def can_reach(one: int, other: int) -> bool:
    """Whether GPU `one` can write into the memory of GPU `other`."""
    core = _core()
    with driver_errors():
        return bool(core.Device(one).can_access_peer(core.Device(other)))


def allow_peers(count: int) -> None:
    """The first `count` GPUs may write into each other's memory from here on."""
    for index in range(count):
        with on_device(index), driver_errors():
            _pool().peer_accessible_by = [other for other in range(count) if other != index]


@cache
def _require_hopper(index: int) -> None:
    core = cuda_core()
    try:
        gpu = core.Device(index)
        capability, name = tuple(gpu.compute_capability), gpu.name
    except Exception as error:  # no device, or no driver at all: each layer has its own exception for that
        raise BackendUnavailable(
            "No NVIDIA GPU can be used here.", "Install the NVIDIA driver, or use --backend cpu."
        ) from error
    if capability != HOPPER:
        raise BackendUnavailable(
            f"The GPU is a {name}; the kernel is written for Hopper (H100, H200).", "Use --backend cpu."
        )


def device_name() -> str:
    return str(device().name)


def processors() -> int:
    """How many multiprocessors the GPU has: the number of workers."""
    return int(device().properties.multiprocessor_count)


def memory_free_and_total() -> tuple[int, int]:
    """Bytes of GPU memory that can still be taken, and all there are."""
    device()
    free, total = _check(
        _bindings().cuMemGetInfo()
    )  # cuda-core asks another library for this, for all processes
    pool = _pool().attributes
    return int(free) + pool.reserved_mem_current - pool.used_mem_current, int(total)


def new_stream() -> Any:
    """A queue of work of its own; it neither waits for the default stream nor holds it up."""
    with driver_errors():
        return device().create_stream()


def new_event() -> Any:
    """A mark on a stream, which can be asked or waited for."""
    with driver_errors():
        return device().create_event()


@cache
def _pool_of(index: int) -> Any:
    core = _core()
    with driver_errors():
        return core.DeviceMemoryResource(device(), core.DeviceMemoryResourceOptions())


def _pool() -> Any:
    """A pool of our own: unlike the process's default one it gives memory back when nothing uses it."""
    return _pool_of(device_index())


@cache
def _memory_stream_of(index: int) -> Any:
    return new_stream()


def _memory_stream() -> Any:
    return _memory_stream_of(device_index())


def _give_back(buffer: Any, index: int) -> None:
    """Frees memory that kernels of GPU `index` have used, once none runs.

    After a fault all calls of the driver fail. The fault was reported where it happened, and other memory has to be
    freed after this: errors end here.
    """
    with on_device(index):
        with contextlib.suppress(BackendError, ResourceError), driver_errors():
            device().sync()  # a pool hands memory on at once, even while a kernel still reads it
        with contextlib.suppress(BackendError, ResourceError), driver_errors():
            buffer.close()


class DeviceMemory:
    """Bytes on the GPU."""

    def __init__(self, count: int, *, for_peers: bool = False) -> None:
        """`for_peers`: other GPUs write into it while a kernel polls it, for which some machines have other memory."""
        device()
        self.bytes, self._device = count, device_index()
        with driver_errors():
            pool = _pool()
            allocate = getattr(pool, "allocate_for_peers", pool.allocate) if for_peers else pool.allocate
            self._buffer = allocate(max(count, 16), stream=_memory_stream())
            _memory_stream().sync()  # from here on every stream may use it
        self.pointer = int(self._buffer.handle)

    @classmethod
    def of(cls, array: NDArray[Any]) -> DeviceMemory:
        memory = cls(array.nbytes)
        memory.write(array)
        return memory

    def write(self, array: NDArray[Any], offset: int = 0) -> None:
        contiguous = np.ascontiguousarray(array)
        with on_device(self._device):
            device()
            if contiguous.nbytes:
                self.copy_in(contiguous.ctypes.data, contiguous.nbytes, offset, _memory_stream())
                _memory_stream().sync()

    def copy_in(self, host_pointer: int, count: int, offset: int, stream: Any) -> None:
        """Starts a copy from host memory, which must not change until `stream` has completed it."""
        assert offset >= 0 and offset + count <= self.bytes, f"{count} bytes at {offset} of {self.bytes}"
        view = _core().Buffer.from_handle
        with driver_errors():
            view(self.pointer + offset, count).copy_from(view(host_pointer, count), stream=stream)

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        assert array.flags.c_contiguous and array.nbytes <= self.bytes
        view = _core().Buffer.from_handle
        with on_device(self._device), driver_errors():
            device()
            host = view(array.ctypes.data, array.nbytes)
            host.copy_from(view(self.pointer, array.nbytes), stream=_memory_stream())
            _memory_stream().sync()
        return array

    def fill(self, byte: int, stream: Any = None) -> None:
        """In the order of `stream`; without one, done when this returns."""
        with on_device(self._device), driver_errors():
            device()
            self._buffer.fill(byte, stream=stream or _memory_stream())
            if stream is None:
                _memory_stream().sync()

    def copy_rows(self, source: DeviceMemory, source_pitch: int, pitch: int, width: int, rows: int) -> None:
        """Rows that lie `source_pitch` apart there and `pitch` apart here. cuda-core copies only whole buffers."""
        driver = _bindings()
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = source.pointer, source_pitch
        copy.dstDevice, copy.dstPitch = self.pointer, pitch
        copy.WidthInBytes, copy.Height = width, rows
        with on_device(self._device):
            device()
            stream = _memory_stream()
            _check((*driver.cuMemcpy2DAsync(copy, stream.handle), None))
            stream.sync()

    def close(self) -> None:
        """Gives the memory back; nothing happens the second time."""
        buffer, self._buffer, self.pointer = getattr(self, "_buffer", None), None, 0
        if buffer is not None:
            _give_back(buffer, self._device)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.close()


class PinnedMemory:
    """Host memory that the GPU sees at the same address; zeroed."""

    def __init__(self, count: int) -> None:
        device()
        self._device = device_index()
        with driver_errors():
            # Not from a pool of pinned memory: not every driver that runs a Hopper has those.
            self._buffer = _core().LegacyPinnedMemoryResource().allocate(max(count, 16))
        self.pointer = int(self._buffer.handle)
        self.view = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(self.pointer))
        self.view[:] = 0

    def close(self) -> None:
        """Gives the memory back; `view` must not be used any more."""
        buffer, self._buffer = getattr(self, "_buffer", None), None
        if buffer is not None:
            _give_back(buffer, self._device)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.close()


class Kernel:
    """A loaded kernel that takes one structure: by value, or in the variable `told` of its constant memory."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, told: str = "") -> None:
        device()
        with driver_errors():
            self._code = _core().ObjectCode.from_cubin(cubin)
            self._kernel = self._code.get_kernel(name)
        self.stream, self._done, self._device = new_stream(), new_event(), device_index()
        self.launches = 0
        self._shared_bytes, self._told = shared_bytes, told
        self._allow_shared_memory(shared_bytes)

    def _allow_shared_memory(self, count: int) -> None:
        """Requests more than 48 KB of shared memory; cuda-core's kernel attributes are read-only."""
        driver = _bindings()
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuKernelSetAttribute(kind, count, driver.CUkernel(int(self._kernel.handle)), 0))

    def load_now(self) -> None:
        """Puts the code onto the GPU. Otherwise the first launch does, and may wait for all kernels that run there: a
        deadlock, if one of those waits for this kernel."""
        driver = _bindings()
        with on_device(self._device):
            device()
            function = _check(driver.cuKernelGetFunction(driver.CUkernel(int(self._kernel.handle))))
            _check((*driver.cuFuncLoad(function), None))

    def launch(self, blocks: int, threads: int, parameters: ctypes.Structure) -> None:
        """All blocks are resident together, or the launch fails.

        Through cuda.bindings because cuda-core's `launch` refuses a structure as an argument.
        """
        driver = _bindings()
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        with on_device(self._device):
            device()
            if self._told:
                self._tell(parameters)
                # Kept until the next launch: the copy may be asynchronous.
                self._parameters = parameters
            _check(
                driver.cuLaunchCooperativeKernel(
                    driver.CUfunction(int(self._kernel.handle)), blocks, 1, 1, threads, 1, 1, self._shared_bytes,
                    self.stream.handle, 0 if self._told else ctypes.addressof(pointers),
                )
            )  # fmt: skip
            self.launches += 1
            with driver_errors():
                self.stream.record(self._done)

    def _tell(self, parameters: ctypes.Structure) -> None:
        """Copies the parameters into the constant memory that later launches read."""
        driver, size = _bindings(), ctypes.sizeof(parameters)
        library = driver.CUlibrary(int(self._code.handle))
        place, room = _check(driver.cuLibraryGetGlobal(library, self._told.encode()))
        assert room == size, f"{size} bytes for {room}"
        copy = driver.cuMemcpyHtoDAsync(place, ctypes.addressof(parameters), size, self.stream.handle)
        _check((*copy, None))

    def finished(self) -> bool:
        """Whether the latest launch has ended; a fault of it is raised here."""
        with on_device(self._device), driver_errors():
            device()
            return bool(self._done.is_done)

    def wait(self) -> None:
        with on_device(self._device), driver_errors():
            device()
            self.stream.sync()
