"""Builds the native library: when the package is installed, and again whenever its sources have changed.

A library is named after the hash of its sources, flags and compiler target, so a stale one can never be loaded. The
installed package carries one; a checkout builds its own into the cache directory on first use (half a minute on two
cores). This module needs nothing but the standard library, because the installer runs it by itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
#: What this library shares with the one that packs for GPUs: blocks of GGUF files.
SHARED = Path(__file__).parent.parent / "cuda" / "native" / "gguf_row.cpp"
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-pthread", "-Wall", "-Wextra",
    "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off",  # a fused multiply-add only where the source says so: sums must not depend on inlining
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=256")
#: Extra flags of the files that hold one instruction set's kernels, by machine.
KERNEL_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "aarch64": {"kernels_neon.cpp": ("-march=armv8.2-a+dotprod",)},
    "arm64": {"kernels_neon.cpp": ("-march=armv8.2-a+dotprod",)},
    "x86_64": {
        "kernels_avx2.cpp": _AVX2,
        "kernels_avxvnni.cpp": (*_AVX2, "-mavxvnni"),
        "kernels_avx512.cpp": (*_AVX2, *_AVX512),
    },
}


class BuildError(Exception):
    """The library could not be built; the message says why."""


#: How zig, which builds the wheels, spells a flag that GCC and Clang share.
ZIG_FLAGS = {"-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod"}


def library_name(machine: str | None = None) -> str:
    """The file name that the library must have to belong to these sources. `machine` is another than this one."""
    digest = hashlib.sha256(
        repr((COMMON_FLAGS, KERNEL_FLAGS, machine or platform.machine(), platform.system())).encode()
    )
    for source in (*sorted(SOURCES.iterdir()), SHARED, SHARED.with_suffix(".h")):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"monotape-{digest.hexdigest()[:16]}.so"


def find_compiler(preferred: str | None = None) -> list[str] | None:
    """The C++ compiler's command line, or None where there is none."""
    for candidate in filter(None, (preferred, "c++", "g++", "clang++")):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def build(folder: Path, compiler: list[str] | None, machine: str | None = None) -> Path:
    """Compiles the library into `folder`, published by an atomic rename. `machine`: what the compiler compiles for."""
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++ or clang++) was found")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(machine)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = _compile_all(compiler, Path(scratch), machine or platform.machine())
        library = Path(scratch) / target.name
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])
        os.replace(library, target)
    return target


def _compile_all(compiler: list[str], scratch: Path, machine: str) -> list[Path]:
    extra = KERNEL_FLAGS.get(machine, {})
    spelling = ZIG_FLAGS if Path(compiler[0]).name == "zig" else {}

    def compile_one(source: Path) -> Path:
        target = scratch / f"{source.stem}.o"
        more = [spelling.get(flag, flag) for flag in extra.get(source.name, ())]
        to_object = ("-c", str(source), "-o", str(target))
        try:
            _run([*compiler, *COMMON_FLAGS, *more, *to_object])
        except BuildError as error:
            # An older compiler names the flag, an older assembler behind a newer compiler the instruction.
            if not any(sign in str(error) for sign in (*more, "no such instruction")):
                raise
            _run([*compiler, *COMMON_FLAGS, *to_object])  # without this file's kernels
        return target

    longest_first = sorted(
        (*SOURCES.glob("*.cpp"), SHARED), key=lambda file: not file.name.startswith("kernels_")
    )
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = dict(zip(longest_first, pool.map(compile_one, longest_first), strict=True))
    return [objects[file] for file in link_order(longest_first, machine)]


def link_order(files: Iterable[Path], machine: str) -> list[Path]:
    """Of an inline function in several objects the linker keeps the first: one for every machine, not one for AVX."""
    extra = KERNEL_FLAGS.get(machine, {})
    return sorted(files, key=lambda file: (file.name in extra, file.name))


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be started: {error.strerror}") from error
    if result.returncode:
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip())
        raise BuildError(f"{command[0]} failed: {first}")
