"""Compiles the kernel with NVRTC, caches the result under a hash of its inputs, and reads its resource usage."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from monotape.config import cache_dir
from monotape.errors import BackendError, BackendUnavailable
from monotape.plan.gpu_machines import GPU_MACHINES, HOPPER, GpuMachine

_log = logging.getLogger("monotape")
KERNELS = Path(__file__).parent.parent.parent / "kernels"
ARCHITECTURE = "sm_90a"
STANDARD = "c++17"
KERNEL_FILE = "monotape.cu"
#: Sections of a cubin that the GPU executes or reads. Their names may end in symbols, which change nothing. Constant
#: bank 4 is left out: it holds the addresses of what is in _NAMED_DATA.
_MACHINE_CODE = (".text.", ".nv.constant0", ".nv.constant2", ".nv.constant3")
#: Variables with a value. A copy of every named constant is there too, used or not; its value is in the instructions.
_NAMED_DATA, _LARGEST_SCALAR = ".nv.global.init", 8
_NO_BITS = 8  # of a section's header: it has a length and no contents
_COMPILER = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")


def cuda_core() -> Any:
    """The cuda-core package; importing it takes a third of a second, so nothing does before it is needed."""
    try:
        import cuda.core
    except ImportError as error:
        raise BackendUnavailable(
            "The CUDA packages are not installed.", "Install them with: pip install 'monotape[cuda]'"
        ) from error
    return cuda.core


def compile_kernel(header: str, source: str = KERNEL_FILE) -> bytes:
    """The cubin of a kernel file for this plan.h, from the cache where sources, options and compiler are the same."""
    return kept_code(cached_path(header, source), lambda: _compile(header, source))


def kept_code(path: Path, compile_code: Callable[[], bytes]) -> bytes:
    """What lies at `path`; it is compiled and put there first if there is nothing.

    Code that cannot be put there is as good: only the next start has to compile it again.
    """
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = compile_code()
    try:
        _keep(code, path)
    except OSError as error:
        _say_not_kept(path.parent, error.strerror or str(error))
    return code


def _keep(code: bytes, path: Path) -> None:
    """Whole or not at all, also when two processes compile the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(code)
        os.replace(temporary, path)
    except OSError:  # a disk that is full has a part of it
        temporary.unlink(missing_ok=True)
        raise


@cache
def _say_not_kept(folder: Path, why: str) -> None:
    """Once a process: every rank has a kernel of its own."""
    _log.warning(
        "The compiled kernel cannot be kept in %s (%s), so the next start compiles it again. "
        "Set MONOTAPE_CACHE to a folder that can be written.",
        folder, why,
    )  # fmt: skip


def cached_path(header: str, source: str = KERNEL_FILE) -> Path:
    """Where the cubin lies once it has been compiled."""
    files = [KERNELS / source, *headers()]
    contents = [(str(file.relative_to(KERNELS)), file.read_text("utf-8")) for file in files]
    key = repr((header, contents, ARCHITECTURE, STANDARD, _compiler_version()))
    return cache_dir() / "cubin" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"


def headers(machine: GpuMachine = HOPPER) -> list[Path]:
    """All headers that a kernel for this machine may include: not those of other machines."""
    others = tuple(other.header for other in GPU_MACHINES.values() if other is not machine)
    return [file for file in sorted(KERNELS.rglob("*.h")) if not file.name.startswith(others)]


def _compiler_version() -> tuple[int, int]:
    try:
        from cuda.bindings import nvrtc  # cuda-core does not expose NVRTC's version
    except ImportError as error:
        raise BackendUnavailable(
            "The CUDA packages are not installed.", "Install them with: pip install 'monotape[cuda]'"
        ) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise BackendUnavailable(
            "NVRTC, NVIDIA's runtime compiler, is not installed.",
            "Install it with: pip install nvidia-cuda-nvrtc",
        ) from error
    assert int(status) == 0
    return major, minor


def _compile(header: str, source: str) -> bytes:
    core = cuda_core()
    with tempfile.TemporaryDirectory() as folder:
        # cuda-core takes headers from folders only, so plan.h becomes a file for a moment.
        Path(folder, "plan.h").write_text(header, "utf-8")
        options = core.ProgramOptions(
            name=source, arch=ARCHITECTURE, std=STANDARD, include_path=[folder, str(KERNELS)]
        )
        try:
            program = core.Program((KERNELS / source).read_text("utf-8"), "c++", options=options)
            cubin = program.compile("cubin").code
        except Exception as error:
            if not is_cuda_error(error):
                raise
            raise BackendError(
                f"The kernel does not compile: {error}", "This is a fault in Monotape."
            ) from error
    assert isinstance(cubin, bytes)
    return cubin


def is_cuda_error(error: BaseException) -> bool:
    """Whether cuda-core raised it for the driver or the compiler; the class itself has no public name."""
    return any(kind.__name__ == "CUDAError" for kind in type(error).__mro__)


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Registers and local memory per thread of a compiled kernel."""

    registers: int
    stack_bytes: int


def resource_usage(cubin: bytes) -> ResourceUsage:
    """Read off the cubin's .nv.info sections, so that it can be checked where there is no GPU."""
    registers: list[int] = []
    stack: list[int] = []
    for data in (data for name, data in _elf_sections(cubin) if name == ".nv.info"):
        position = 0
        while position + 4 <= len(data):
            kind, attribute, size = struct.unpack_from("<BBH", data, position)
            if kind == 4 and attribute in (0x2F, 0x11) and size >= 8:  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
                value = struct.unpack_from("<II", data, position + 4)[1]
                (registers if attribute == 0x2F else stack).append(value)
            position += 4 + (size if kind == 4 else 0)
    return ResourceUsage(max(registers), max(stack, default=0))


def machine_code(cubin: bytes) -> str:
    """Names what the GPU runs: a hash of instructions, constants and tables, without names, notes and debug data."""
    sections = _elf_sections(cubin)
    found = [(kind, data) for name, data in sections for kind in _MACHINE_CODE if name.startswith(kind)]
    found += [(_NAMED_DATA, data) for data in sorted(_tables(sections))]
    digest = hashlib.sha256()
    for kind, data in found:
        digest.update(f"{kind} {len(data)} ".encode() + data)
    return digest.hexdigest()[:16]


def _tables(sections: list[tuple[str, bytes]]) -> list[bytes]:
    """Variables with a value that are larger than a named constant."""
    symbols = next((data for name, data in sections if name == ".symtab"), b"")
    found = []
    for _, _, _, section, start, size in struct.iter_unpack("<IBBHQQ", symbols):
        if section < len(sections) and sections[section][0] == _NAMED_DATA and size > _LARGEST_SCALAR:
            found.append(sections[section][1][start : start + size])
    return found


def compiler_of(cubin: bytes) -> str:
    """The version of the compiler that made it, such as 13.0.88, as its notes say."""
    for name, data in _elf_sections(cubin):
        if name.startswith(".note.nv") and (found := _COMPILER.search(data)):
            return found[1].decode()
    return "unknown"


def _elf_sections(image: bytes) -> list[tuple[str, bytes]]:
    """The names and contents of an ELF file's sections, in the file's order."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    found = []
    for entry, kind, _, _, offset, length in headers:
        start = names + entry
        name = image[start : image.index(b"\0", start)].decode()
        found.append((name, b"" if kind == _NO_BITS else image[offset : offset + length]))
    return found
