"""The CUDA driver, as much of it as we need: memory that frees itself, compilation, one cooperative launch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.config import cache_dir
from monotape.errors import BackendError, BackendUnavailable, ResourceError

KERNELS = Path(__file__).parent.parent.parent / "kernels"
ARCHITECTURE = "sm_90a"
COMPILE_OPTIONS = ("--std=c++17", f"--gpu-architecture={ARCHITECTURE}")


def _modules() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise BackendUnavailable(
            "The CUDA packages are not installed.", "Install them with: pip install 'monotape[cuda]'"
        ) from error
    return driver, nvrtc


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; an error of it becomes an exception with the driver's own name for it."""
    status, *values = result
    if int(status) == 0:
        return values[0] if len(values) == 1 else tuple(values)
    name = getattr(status, "name", str(status))
    if "OUT_OF_MEMORY" in name:
        raise ResourceError("The GPU has too little free memory.", "Use a smaller model or --max-model-len.")
    raise BackendError(f"The CUDA driver says {name}.", "Run `monotape doctor`.")


def device() -> Any:
    """The first GPU, its context made current in this thread."""
    gpu, context = _gpu_and_context()
    check((*_modules()[0].cuCtxSetCurrent(context), None))
    return gpu


@cache
def _gpu_and_context() -> tuple[Any, Any]:
    """Anything but a Hopper is refused."""
    driver, _ = _modules()
    try:
        check(driver.cuInit(0))
        gpu = check(driver.cuDeviceGet(0))
    except (BackendError, RuntimeError) as error:  # no device, or no driver at all
        raise BackendUnavailable(
            "No NVIDIA GPU can be used here.", "Install the NVIDIA driver, or use --backend cpu."
        ) from error
    attribute = driver.CUdevice_attribute
    major = check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, gpu))
    if major != 9:
        name = check(driver.cuDeviceGetName(80, gpu)).decode().strip("\0")
        raise BackendUnavailable(
            f"The GPU is a {name}; the kernel is written for Hopper (H100, H200).", "Use --backend cpu."
        )
    return gpu, check(driver.cuDevicePrimaryCtxRetain(gpu))


def processors() -> int:
    """How many multiprocessors the GPU has: the number of workers."""
    driver, _ = _modules()
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(check(driver.cuDeviceGetAttribute(kind, device())))


class DeviceMemory:
    """Bytes on the GPU."""

    def __init__(self, count: int) -> None:
        driver, _ = _modules()
        device()
        self.bytes = count
        self.pointer = int(check(driver.cuMemAlloc(max(count, 16))))

    @classmethod
    def of(cls, array: NDArray[Any]) -> DeviceMemory:
        memory = cls(array.nbytes)
        memory.write(array)
        return memory

    def write(self, array: NDArray[Any], offset: int = 0) -> None:
        driver, _ = _modules()
        device()
        contiguous = np.ascontiguousarray(array)
        check((*driver.cuMemcpyHtoD(self.pointer + offset, contiguous.ctypes.data, contiguous.nbytes), None))

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        driver, _ = _modules()
        device()
        check((*driver.cuMemcpyDtoH(array.ctypes.data, self.pointer, array.nbytes), None))
        return array

    def fill(self, byte: int, stream: Any = 0) -> None:
        """In the order of `stream`; the default stream does not wait for ours, nor ours for it."""
        driver, _ = _modules()
        check((*driver.cuMemsetD8Async(self.pointer, byte, self.bytes, stream), None))

    def __del__(self) -> None:
        if getattr(self, "pointer", 0) and not sys.is_finalizing():
            _modules()[0].cuMemFree(self.pointer)
            self.pointer = 0


class PinnedMemory:
    """Host memory that the GPU sees at the same address; zeroed."""

    def __init__(self, count: int) -> None:
        driver, _ = _modules()
        device()
        self.pointer = int(check(driver.cuMemHostAlloc(max(count, 16), 2)))  # DEVICEMAP
        self.view = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(self.pointer))
        self.view[:] = 0

    def __del__(self) -> None:
        if getattr(self, "pointer", 0) and not sys.is_finalizing():
            _modules()[0].cuMemFreeHost(self.pointer)
            self.pointer = 0


def compile_kernel(header: str) -> bytes:
    """The cubin for this plan.h, from the cache where sources, options and compiler are the same."""
    sources = {
        path.name: path.read_text() for path in sorted(KERNELS.iterdir()) if path.suffix in (".h", ".cu")
    }
    _, nvrtc = _modules()
    version = check(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((header, sources, COMPILE_OPTIONS, version)).encode()).hexdigest()[:24]
    path = cache_dir() / "cubin" / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = _compile(header, sources)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(cubin)
    os.replace(temporary, path)
    return cubin


def _compile(header: str, sources: dict[str, str]) -> bytes:
    _, nvrtc = _modules()
    included = {**{name: text for name, text in sources.items() if name.endswith(".h")}, "plan.h": header}
    names, texts = [name.encode() for name in included], [text.encode() for text in included.values()]
    program = check(
        nvrtc.nvrtcCreateProgram(sources["monotape.cu"].encode(), b"monotape.cu", len(names), texts, names)
    )
    options = [option.encode() for option in COMPILE_OPTIONS]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise BackendError(f"The kernel does not compile: {log.decode()}", "This is a fault in Monotape.")
    cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    check(nvrtc.nvrtcDestroyProgram(program))
    return cubin


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What a compiled kernel takes per thread."""

    registers: int
    stack_bytes: int


def resource_usage(cubin: bytes) -> ResourceUsage:
    """Read off the cubin's .nv.info sections, so that it can be checked where there is no GPU."""
    registers: list[int] = []
    stack: list[int] = []
    for data in _elf_sections(cubin, ".nv.info"):
        position = 0
        while position + 4 <= len(data):
            kind, attribute, size = struct.unpack_from("<BBH", data, position)
            if kind == 4 and attribute in (0x2F, 0x11) and size >= 8:  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
                value = struct.unpack_from("<II", data, position + 4)[1]
                (registers if attribute == 0x2F else stack).append(value)
            position += 4 + (size if kind == 4 else 0)
    return ResourceUsage(max(registers), max(stack, default=0))


def _elf_sections(image: bytes, name: str) -> list[bytes]:
    """The contents of an ELF file's sections of that name."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    found = []
    for entry, _, _, _, offset, length in headers:
        start = names + entry
        if image[start : image.index(b"\0", start)].decode() == name:
            found.append(image[offset : offset + length])
    return found


class Kernel:
    """A loaded kernel that takes one pointer to its parameters."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        driver, _ = _modules()
        device()
        self._module = check(driver.cuModuleLoadData(cubin))
        self._function = check(driver.cuModuleGetFunction(self._module, name.encode()))
        self._shared_bytes = shared_bytes
        self.launches = 0
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._function, kind, shared_bytes))
        self.stream = check(driver.cuStreamCreate(1))

    def launch(self, blocks: int, threads: int, parameters: ctypes.Structure) -> None:
        """All blocks are resident together, or the launch fails."""
        driver, _ = _modules()
        device()
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        check(
            driver.cuLaunchCooperativeKernel(
                self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes, self.stream,
                ctypes.addressof(pointers),
            )
        )  # fmt: skip
        self.launches += 1

    def finished(self) -> bool:
        driver, _ = _modules()
        device()
        (status,) = driver.cuStreamQuery(self.stream)
        if int(status) not in (0, 600):
            check((status,))
        return int(status) == 0

    def wait(self) -> None:
        check((*_modules()[0].cuStreamSynchronize(self.stream), None))
