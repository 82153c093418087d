"""AMD's HIP runtime made of host memory: C functions with the signatures of backends/hip/library.py, so that the host
side of the HIP backend runs anywhere. A code object is a library of backends/host_kernel.py, and a launch runs it.

Work waits on its stream until it is synchronised or an event is asked for, as in fake_cuda.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_void_p
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from backends.fake_cuda import Event, FakeCuda, Stream
from backends.guarded_memory import GuardedMemory
from backends.host_kernel import HostKernel, Schedule, build, run_on_host
from monotape.backends.cuda import driver
from monotape.backends.cuda.params import ParamsStruct
from monotape.backends.hip import backend as module
from monotape.backends.hip.library import CALLS, OUT_OF_MEMORY, PEER_ACCESS_ALREADY_ENABLED, HipLibrary
from monotape.backends.hip.runtime import HipRuntime

INVALID, NO_DEVICE, ILLEGAL_ADDRESS = 1, 100, 700
FINE_GRAIN = 1  # hipDeviceMallocFinegrained
_ERRORS = {
    1: "hipErrorInvalidValue", 2: "hipErrorOutOfMemory", 100: "hipErrorNoDevice", 700: "hipErrorIllegalAddress",
    704: "hipErrorPeerAccessAlreadyEnabled", 999: "hipErrorUnknown",
}  # fmt: skip
_NAMES = {code: ctypes.create_string_buffer(name.encode()) for code, name in _ERRORS.items()}


@dataclass
class Launched:
    """A kernel that waits for its turn; those of several GPUs run together."""

    library: str
    blocks: int
    parameters: ParamsStruct
    stream: Stream
    place: int  # in the stream's work
    ran: bool = False


@dataclass
class FakeHip:
    """`failing`: calls that return this hipError_t."""

    name: str = "AMD Instinct MI300X"
    capability: tuple[int, int] = (9, 4)
    processors: int = 5
    cooperative: int = 1
    devices: int = 1
    memory: int = 1 << 30
    connected: bool = True  # whether GPUs can access each other's memory
    failing: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    wrong: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept: dict[int, tuple[GuardedMemory, int]] = {}
        self._handles: dict[int, Any] = {}
        self._next = count(1000)
        self._told: dict[int, ParamsStruct] = {}  # what each module has in constant memory
        self._launched: list[Launched] = []
        self.current = 0  # the GPU of calls that name none
        self.fine: list[int] = []  # memory of a fine grain
        self.peers: set[tuple[int, int]] = set()  # GPUs that may access another's memory

    @property
    def used(self) -> int:
        return sum(size for _, size in self.kept.values())

    def library(self) -> HipLibrary:
        functions = {name: self._function(name, arguments) for name, arguments in CALLS.items()}
        name_of = CFUNCTYPE(c_void_p, c_int)(lambda code: ctypes.addressof(_NAMES[code]))
        return HipLibrary(SimpleNamespace(**functions, hipGetErrorName=name_of))

    def _function(self, name: str, arguments: tuple[Any, ...]) -> Any:
        action: Callable[..., int | None] = getattr(self, f"_{name}")

        def called(*values: Any) -> int:
            self.calls.append((name, *values))
            if name in self.failing:
                if self.failing[name] == ILLEGAL_ADDRESS:
                    self._lose_work()
                return self.failing[name]
            try:
                return action(*values) or 0
            except BaseException as error:  # C cannot pass it on
                self.wrong.append(error)
                return 999

        return CFUNCTYPE(c_int, *arguments)(called)

    def _lose_work(self) -> None:
        """After a fault of a kernel nothing runs any more."""
        for handle in self._handles.values():
            if isinstance(handle, Stream):
                handle.done = len(handle.work)

    def _new(self, place: Any, made: Any) -> None:
        place[0] = next(self._next)
        self._handles[place[0]] = made

    def _stream(self, handle: int) -> Stream:
        stream = self._handles[handle]
        assert isinstance(stream, Stream)
        return stream

    # Devices
    def _hipInit(self, flags: int) -> None: ...  # noqa: N802
    def _hipSetDevice(self, index: int) -> int:  # noqa: N802
        self.current = index
        return 0 if index < self.devices else NO_DEVICE

    def _hipGetDeviceCount(self, out: Any) -> None:  # noqa: N802
        out[0] = self.devices

    def _hipDeviceGetName(self, out: int, size: int, index: int) -> None:  # noqa: N802
        ctypes.memmove(out, self.name.encode() + b"\0", len(self.name) + 1)

    def _hipDeviceGetAttribute(self, out: Any, number: int, index: int) -> int:  # noqa: N802
        known = {23: self.capability[0], 61: self.capability[1], 10: self.cooperative, 63: self.processors}
        out[0] = known[number]
        return 0 if index < self.devices else NO_DEVICE

    def _hipDeviceSynchronize(self) -> None:  # noqa: N802
        for handle in self._handles.values():
            if isinstance(handle, Stream):
                handle.sync()

    def _hipDeviceCanAccessPeer(self, out: Any, one: int, other: int) -> None:  # noqa: N802
        out[0] = int(self.connected)

    def _hipDeviceEnablePeerAccess(self, peer: int, flags: int) -> int:  # noqa: N802
        if (self.current, peer) in self.peers:
            return PEER_ACCESS_ALREADY_ENABLED
        self.peers.add((self.current, peer))
        return 0

    # Memory
    def _hipMemGetInfo(self, free: Any, total: Any) -> None:  # noqa: N802
        free[0], total[0] = self.memory - self.used, self.memory

    def _allocate(self, out: Any, size: int) -> int:
        if self.used + size > self.memory:
            return OUT_OF_MEMORY
        memory = GuardedMemory(size)
        ctypes.memset(memory.address, 0xA5, size)  # new memory need not be zero
        self.kept[memory.address] = memory, size
        out[0] = memory.address
        return 0

    def _hipMalloc(self, out: Any, size: int) -> int:  # noqa: N802
        code = self._allocate(out, size)
        if code == 0:
            FakeCuda.device_memory[out[0]] = self.kept[out[0]][0]
        return code

    def _hipExtMallocWithFlags(self, out: Any, size: int, flags: int) -> int:  # noqa: N802
        assert flags == FINE_GRAIN
        code = self._hipMalloc(out, size)
        if code == 0:
            self.fine.append(out[0])
        return code

    def _hipHostMalloc(self, out: Any, size: int, flags: int) -> int:  # noqa: N802
        return self._allocate(out, size)

    def _hipFree(self, at: int) -> None:  # noqa: N802
        FakeCuda.device_memory.pop(at, None)
        self.kept.pop(at)[0].close()

    _hipHostFree = _hipFree  # noqa: N815

    def _hipMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        self._stream(stream).work.append(lambda: ctypes.memmove(to, source, size))

    def _hipMemcpy2DAsync(  # noqa: N802
        self,
        to: int,
        pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        kind: int,
        stream: int,
    ) -> None:
        for row in range(rows):
            self._hipMemcpyAsync(to + row * pitch, source + row * source_pitch, width, kind, stream)

    def _hipMemsetAsync(self, at: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        self._stream(stream).work.append(lambda: ctypes.memset(at, value, size))

    # Streams and events
    def _hipStreamCreateWithFlags(self, out: Any, flags: int) -> None:  # noqa: N802
        self._new(out, Stream())

    def _hipStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        self._stream(stream).sync()

    def _hipEventCreateWithFlags(self, out: Any, flags: int) -> None:  # noqa: N802
        self._new(out, Event())

    def _hipEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._stream(stream).record(self._handles[event])

    def _hipEventSynchronize(self, event: int) -> None:  # noqa: N802
        self._handles[event].sync()

    _hipEventQuery = _hipEventSynchronize  # noqa: N815

    # Kernels
    def _hipModuleLoadData(self, out: Any, code: int) -> None:  # noqa: N802
        self._new(out, ctypes.string_at(code).decode())
        self._told[out[0]] = ParamsStruct()

    def _hipModuleGetFunction(self, out: Any, library: int, name: bytes) -> int:  # noqa: N802
        self._new(out, library)
        return 0 if name == b"monotape_request" else INVALID

    def _hipModuleGetGlobal(self, out: Any, size: Any, library: int, name: bytes) -> int:  # noqa: N802
        out[0], size[0] = ctypes.addressof(self._told[library]), ctypes.sizeof(ParamsStruct)
        return 0 if name == b"request" else INVALID

    def _hipModuleLaunchCooperativeKernel(self, function: int, *rest: Any) -> None:  # noqa: N802
        module, blocks, stream = self._handles[function], rest[0], self._stream(rest[7])
        launched = Launched(self._handles[module], blocks, self._told[module], stream, len(stream.work))
        self._launched.append(launched)
        stream.work.append(lambda: self._run(launched))

    def _run(self, launched: Launched) -> None:
        """With all others that have been launched: they may wait for each other."""
        if launched.ran:
            return
        together = [other for other in self._launched if not other.ran]
        assert all(other.library == launched.library for other in together), "ranks that are built alike"
        for other in together:
            other.ran = True
            if other is not launched:
                other.stream.run(other.place)  # what comes before it, its parameters among that
        parameters = [ParamsStruct.from_buffer_copy(other.parameters) for other in together]
        run_on_host(launched.library, launched.blocks, parameters)
        self._launched.clear()


@contextmanager
def fake_hip(hip: FakeHip) -> Iterator[FakeHip]:
    """Within, HipBackend runs on `hip`."""
    runtime = HipRuntime(hip.library())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "hip_runtime", lambda: runtime)
        patch.setattr(module, "compile_kernel", lambda text: build(text) + b"\0")
        patch.setattr(HostKernel, "schedule", Schedule())
        try:
            yield hip
        finally:
            driver.use_runtime(None)
    if hip.wrong:
        raise hip.wrong[0]
