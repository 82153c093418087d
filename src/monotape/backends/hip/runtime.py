"""AMD's GPUs behind the calls of cuda-core that backends/cuda/driver.py uses, so that the host side exists once.

Tested against a fake library (tests/backends/fake_hip.py); never run on hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_void_p
from functools import cache
from types import SimpleNamespace
from typing import Any

from monotape.backends.hip.library import (
    NOT_READY,
    PEER_ACCESS_ALREADY_ENABLED,
    HipError,
    HipLibrary,
    hip_library,
)
from monotape.errors import BackendUnavailable

CAPABILITY = (9, 4)  # of gfx942
_MAJOR, _MINOR, _COOPERATIVE, _PROCESSORS = 23, 61, 10, 63  # hipDeviceAttribute_t
_NON_BLOCKING, _NO_TIMING = 1, 2  # flags of streams and of events
_ANY_DIRECTION = 4  # hipMemcpyDefault
#: hipHostMallocMapped and hipHostMallocCoherent: the host sees what a running kernel writes.
_MAILBOX = 0x2 | 0x40000000
_FINE_GRAIN = 1  # hipDeviceMallocFinegrained
_NAME_BYTES = 256


class Event:
    def __init__(self, hip: HipLibrary) -> None:
        self._hip, self.handle = hip, hip.new("hipEventCreateWithFlags", _NO_TIMING)

    def sync(self) -> None:
        self._hip.call("hipEventSynchronize", self.handle)

    @property
    def is_done(self) -> bool:
        code = self._hip.status("hipEventQuery", self.handle)
        if code not in (0, NOT_READY):
            self._hip.call("hipEventSynchronize", self.handle)  # raises what went wrong
        return code == 0


class Stream:
    def __init__(self, hip: HipLibrary) -> None:
        self._hip, self.handle = hip, hip.new("hipStreamCreateWithFlags", _NON_BLOCKING)

    def sync(self) -> None:
        self._hip.call("hipStreamSynchronize", self.handle)

    def record(self, event: Event) -> None:
        self._hip.call("hipEventRecord", event.handle, self.handle)


class Buffer:
    """Bytes of a GPU or of the host; `free` is the call that gives them back."""

    def __init__(self, hip: HipLibrary, handle: int, size: int, free: str = "") -> None:
        self._hip, self.handle, self.size, self._free = hip, handle, size, free

    def copy_from(self, source: Buffer, *, stream: Stream) -> None:
        assert self.size == source.size
        self._hip.call("hipMemcpyAsync", self.handle, source.handle, self.size, _ANY_DIRECTION, stream.handle)

    def fill(self, value: int, *, stream: Stream) -> None:
        self._hip.call("hipMemsetAsync", self.handle, value, self.size, stream.handle)

    def close(self) -> None:
        free, self._free = self._free, ""
        if free:
            self._hip.call(free, self.handle)


class Device:
    """One GPU; HIP's calls go to the one that is current in the calling thread."""

    def __init__(self, hip: HipLibrary, index: int) -> None:
        self._hip, self.device_id = hip, index

    def set_current(self) -> None:
        self._hip.call("hipSetDevice", self.device_id)

    def attribute(self, number: int) -> int:
        return self._hip.number("hipDeviceGetAttribute", number, self.device_id)

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._hip.call("hipDeviceGetName", text, _NAME_BYTES, self.device_id)
        return text.value.decode(errors="replace")

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.attribute(_MAJOR), self.attribute(_MINOR)

    @property
    def properties(self) -> Any:
        return SimpleNamespace(multiprocessor_count=self.attribute(_PROCESSORS))

    @property
    def launches_cooperatively(self) -> bool:
        return bool(self.attribute(_COOPERATIVE))

    def can_access_peer(self, other: Device) -> bool:
        return bool(self._hip.number("hipDeviceCanAccessPeer", self.device_id, other.device_id))

    def create_stream(self) -> Stream:
        return Stream(self._hip)

    def create_event(self) -> Event:
        return Event(self._hip)

    def sync(self) -> None:
        self._hip.call("hipDeviceSynchronize")


class Devices:
    """All GPUs of this machine."""

    def __init__(self, hip: HipLibrary) -> None:
        self._hip = hip

    def __call__(self, index: int) -> Device:
        return Device(self._hip, index)

    def get_all_devices(self) -> list[Device]:
        return [self(index) for index in range(self._hip.number("hipGetDeviceCount"))]


class DeviceMemoryResource:
    """Memory of the current GPU. HIP keeps no pool of ours: freed memory is free.

    A GPU's access to another's memory is a setting of the first, and peers have it both ways."""

    def __init__(self, hip: HipLibrary) -> None:
        self._hip = hip
        self.attributes = SimpleNamespace(reserved_mem_current=0, used_mem_current=0)
        self._peers: set[int] = set()

    def allocate(self, size: int, *, stream: Stream) -> Buffer:
        return Buffer(self._hip, self._hip.new("hipMalloc", size), size, "hipFree")

    def allocate_for_peers(self, size: int, *, stream: Stream) -> Buffer:
        """Of a fine grain: what another GPU writes is seen by a kernel that runs."""
        address = self._hip.new("hipExtMallocWithFlags", size, _FINE_GRAIN)
        return Buffer(self._hip, address, size, "hipFree")

    @property
    def peer_accessible_by(self) -> Sequence[int]:
        return sorted(self._peers)

    @peer_accessible_by.setter
    def peer_accessible_by(self, peers: Sequence[int]) -> None:
        for peer in set(peers) - self._peers:
            code = self._hip.status("hipDeviceEnablePeerAccess", peer, 0)
            if code not in (0, PEER_ACCESS_ALREADY_ENABLED):
                self._hip.fail(code, "hipDeviceEnablePeerAccess")
            self._peers.add(peer)


class ObjectCode:
    """A code object that is on the GPU; the bytes are kept as long as it is."""

    def __init__(self, hip: HipLibrary, code: bytes) -> None:
        self._hip, self._code = hip, code
        self.handle = hip.new("hipModuleLoadData", code)

    def get_kernel(self, name: str) -> Any:
        return SimpleNamespace(handle=self._hip.new("hipModuleGetFunction", self.handle, name.encode()))


class HipRuntime:
    """Takes the place of the module cuda.core, and of cuda.bindings as far as it is used."""

    name = "HIP runtime"
    Error = HipError

    def __init__(self, hip: HipLibrary) -> None:
        self._hip = hip
        self.Device = Devices(hip)
        self.Buffer = SimpleNamespace(from_handle=lambda handle, size: Buffer(hip, handle, size))
        self.ObjectCode = SimpleNamespace(from_cubin=lambda code: ObjectCode(hip, code))
        self._fit: set[int] = set()

    def DeviceMemoryResourceOptions(self) -> None:  # noqa: N802
        return None

    def DeviceMemoryResource(self, device: Device, options: None) -> DeviceMemoryResource:  # noqa: N802
        return DeviceMemoryResource(self._hip)

    def LegacyPinnedMemoryResource(self) -> Any:  # noqa: N802
        hip = self._hip
        return SimpleNamespace(
            allocate=lambda size: Buffer(hip, hip.new("hipHostMalloc", size, _MAILBOX), size, "hipHostFree")
        )

    def require(self, index: int) -> None:
        """Refuses a GPU that the kernel is not compiled for."""
        if index in self._fit:
            return
        try:
            gpu = Device(self._hip, index)
            capability, name, whole = gpu.compute_capability, gpu.name, gpu.launches_cooperatively
        except HipError as error:
            raise BackendUnavailable(
                "No AMD GPU can be used here.", "Is the amdgpu driver loaded? Otherwise use --backend cpu."
            ) from error
        if capability != CAPABILITY:
            raise BackendUnavailable(
                f"The GPU is a {name}; the kernel is compiled for gfx942 (MI300X).", "Use --backend cpu."
            )
        if not whole:
            raise BackendUnavailable(
                f"This {name} does not launch all workers of a kernel together.", "Use --backend cpu."
            )
        self._fit.add(index)

    @property
    def bindings(self) -> Any:
        """Calls in cuda.bindings' manner: each returns a status, then its values."""
        hip = self._hip

        def memory_info() -> tuple[int, int]:
            free, total = c_size_t(), c_size_t()
            hip.call("hipMemGetInfo", byref(free), byref(total))
            return free.value, total.value

        def global_of(module: int, name: bytes) -> tuple[int, int]:
            place, size = c_void_p(), c_size_t()
            hip.call("hipModuleGetGlobal", byref(place), byref(size), module, name)
            return place.value or 0, size.value

        def tell(place: int, source: int, size: int, stream: int) -> tuple[()]:
            hip.call("hipMemcpyAsync", place, source, size, _ANY_DIRECTION, stream)
            return ()

        def copy_rows(copy: Any, stream: int) -> tuple[()]:
            hip.call(
                "hipMemcpy2DAsync", copy.dstDevice, copy.dstPitch, copy.srcDevice, copy.srcPitch,
                copy.WidthInBytes, copy.Height, _ANY_DIRECTION, stream,
            )  # fmt: skip
            return ()

        def launch(*arguments: int) -> tuple[()]:
            hip.call("hipModuleLaunchCooperativeKernel", *arguments)
            return ()

        return SimpleNamespace(
            CUDA_MEMCPY2D=SimpleNamespace, CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_DEVICE=2),
            CUlibrary=int, CUkernel=int, CUfunction=int,
            CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=0),
            cuMemGetInfo=_answering(memory_info), cuLibraryGetGlobal=_answering(global_of),
            cuMemcpyHtoDAsync=_answering(tell), cuMemcpy2DAsync=_answering(copy_rows),
            cuLaunchCooperativeKernel=_answering(launch),
            cuKernelSetAttribute=lambda *_: (0,),  # all of the LDS may be asked for without it
            cuKernelGetFunction=lambda kernel: (0, kernel), cuFuncLoad=lambda function: (0,),  # loaded with its module
        )  # fmt: skip


class Status(int):
    """A hipError_t with HIP's name for it."""

    name: str


def _answering(call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def answer(*arguments: Any) -> tuple[Any, ...]:
        try:
            return (0, *call(*arguments))
        except HipError as error:
            status = Status(error.code)
            status.name = str(error).partition(":")[0]
            return (status,)

    return answer


@cache
def hip_runtime() -> HipRuntime:
    return HipRuntime(hip_library())


def find_gpu() -> str | None:
    """The name of this machine's first AMD GPU; None where there is no runtime or no GPU."""
    with contextlib.suppress(BackendUnavailable, HipError):
        gpus = hip_runtime().Device.get_all_devices()
        return gpus[0].name if gpus else None
    return None
