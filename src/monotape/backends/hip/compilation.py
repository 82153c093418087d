"""Compiles the kernel for CDNA3, with hipRTC where ROCm is, else with clang and without any file of ROCm; and reads
what the code object says of itself.

Code objects are cached under a hash of their inputs, as cubins are (backends/cuda/compilation.py). They are
compiled, and their kernel is simulated on the host; none has run on hardware.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from monotape.backends.cuda.compilation import KERNEL_FILE, KERNELS, STANDARD, headers, kept_code
from monotape.backends.hip.rtc import RtcError, hip_rtc
from monotape.config import cache_dir, rocm_path
from monotape.errors import BackendError, BackendUnavailable
from monotape.plan.gpu_machines import CDNA3

ARCHITECTURE = "gfx942"
#: clang 14 does not know gfx942.
COMPILERS = ("clang-19", "clang-20", "clang-21", "clang-18", "clang")
#: ROCm brings one.
_ROCM = ("llvm/bin/clang", "lib/llvm/bin/clang")
#: Of both compilers.
_COMMON = (
    f"--offload-arch={ARCHITECTURE}", f"-std={STANDARD}", "-O3", f'-DMONOTAPE_MACHINE="machine/{CDNA3.header}.h"',
    # A call would need a stack.
    "-mllvm", "-amdgpu-early-inline-all=true", "-mllvm", "-amdgpu-function-calls=false",
    # Addresses and constants that are computed once and kept for a whole token do not fit the registers.
    "-mllvm", "-disable-machine-licm=true", "-mllvm", "-disable-lsr=true",
    # A scalar that is paired with another becomes a vector of two, in vector registers.
    "-fno-slp-vectorize",
)  # fmt: skip
OPTIONS = (
    "-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", "--no-gpu-bundle-output", *_COMMON,
)  # fmt: skip
_COMPILE_S = 600
_HINT = "Install clang 19 and lld 19, for example with: apt install clang-19 lld-19 llvm-19"


@cache
def find_compiler() -> str:
    """A clang that knows the GPU, together with the linker that it calls."""
    for name in (*COMPILERS, *(str(rocm_path() / place) for place in _ROCM)):
        if (path := shutil.which(name)) is not None and _knows_the_gpu(path):
            return path
    raise BackendUnavailable(f"There is no clang here that compiles for {ARCHITECTURE}.", _HINT)


def _knows_the_gpu(compiler: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text('extern "C" __attribute__((global)) void empty() {}\n', "utf-8")
        command = [compiler, *OPTIONS, str(source), "-o", str(Path(folder, "empty.o"))]
        return subprocess.run(command, capture_output=True, check=False, timeout=_COMPILE_S).returncode == 0


def compile_kernel(header: str, source: str = KERNEL_FILE) -> bytes:
    """The code object of a kernel file for this plan.h, from the cache where its inputs are the same."""
    return kept_code(cached_path(header, source), lambda: _compile(header, source))


def cached_path(header: str, source: str = KERNEL_FILE) -> Path:
    """Where the code object lies once it has been compiled."""
    files = [KERNELS / source, *headers(CDNA3)]
    contents = [(str(file.relative_to(KERNELS)), file.read_text("utf-8")) for file in files]
    rtc = hip_rtc()
    key = repr((header, contents, OPTIONS, _version(find_compiler()) if rtc is None else rtc.version))
    return cache_dir() / ARCHITECTURE / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.o"


def _version(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]


def _compile(header: str, source: str) -> bytes:
    if (rtc := hip_rtc()) is None:
        return _compile_with_clang(header, source)
    texts = {str(file.relative_to(KERNELS)): file.read_text("utf-8") for file in headers(CDNA3)}
    try:
        return rtc.compile((KERNELS / source).read_text("utf-8"), {**texts, "plan.h": header}, _COMMON)
    except RtcError as error:  # which versions of it compile the kernel has never been tried
        try:
            return _compile_with_clang(header, source)
        except BackendUnavailable:
            raise _does_not_compile(str(error)) from error


def _does_not_compile(said: str) -> BackendError:
    first = next((line for line in said.splitlines() if "error" in line), said[:200])
    return BackendError(
        f"The kernel does not compile for {ARCHITECTURE}: {first}", "This is a fault in Monotape."
    )


def _compile_with_clang(header: str, source: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "plan.h").write_text(header, "utf-8")
        made = Path(folder, "made.o")
        command = [
            find_compiler(),
            *OPTIONS,
            f"-I{folder}",
            f"-I{KERNELS}",
            str(KERNELS / source),
            "-o",
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)
        if done.returncode:
            raise _does_not_compile(done.stderr)
        return made.read_bytes()


@dataclass(frozen=True, slots=True)
class CodeUsage:
    """What a code object's metadata say of its kernel, per lane or per wave."""

    vector_registers: int
    vector_spills: int
    scalar_spills: int  # into lanes of vector registers, never into memory
    scratch_bytes: int
    lds_bytes: int  # besides what the launch asks for


def _tool(name: str) -> str:
    version = re.search(r"-(\d+)$", find_compiler())
    for tool in (f"{name}-{version[1]}" if version else name, name):
        if (path := shutil.which(tool)) is not None:
            return path
    raise BackendUnavailable(f"LLVM's {name} is not installed.", _HINT)


def _run_on(code: bytes, *command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code.o")
        path.write_bytes(code)
        done = subprocess.run(
            [*command, str(path)], capture_output=True, text=True, check=True, timeout=_COMPILE_S
        )
        return done.stdout


def code_usage(code: bytes) -> CodeUsage:
    notes = _run_on(code, _tool("llvm-readelf"), "--notes")
    fields = (
        "vgpr_count",
        "vgpr_spill_count",
        "sgpr_spill_count",
        "private_segment_fixed_size",
        "group_segment_fixed_size",
    )
    found = [re.search(rf"\.{field}:\s*(\d+)", notes) for field in fields]
    assert all(found), "metadata of a kernel"
    return CodeUsage(*(int(each[1]) for each in found if each))


def disassembly(code: bytes) -> list[str]:
    """Its instructions, one a line."""
    lines = _run_on(code, _tool("llvm-objdump"), "-d", "--no-show-raw-insn").splitlines()
    return [line.split("//")[0].strip() for line in lines if line.startswith("\t")]
