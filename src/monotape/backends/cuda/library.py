"""The native library that packs weights, compiled when the package is installed or on first use.

Its name is a hash of sources and flags, as the CPU backend's (backends/cpu/build.py), so a stale one is never loaded.
The installer runs this, so it needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import tempfile
from pathlib import Path

from monotape.backends.cpu.build import COMMON_FLAGS, BuildError, find_compiler
from monotape.config import cache_dir, cxx_compiler

SOURCES = Path(__file__).parent / "native"
_HALVES = Path(__file__).parent.parent / "cpu" / "native" / "half.h"


def find_library() -> Path:
    """The one that came with the package, the one built before, or one built now, which takes seconds."""
    cache = cache_dir() / "native"
    for folder in (Path(__file__).parent, cache):
        if (folder / library_name()).exists():
            return folder / library_name()
    return build(cache, find_compiler(cxx_compiler()))


def library_name(machine: str | None = None) -> str:
    """The file name that belongs to these sources; `machine` is another than this one."""
    texts = [
        file.read_bytes() for file in (*sorted(SOURCES.glob("*.h")), *sorted(SOURCES.glob("*.cpp")), _HALVES)
    ]
    key = repr((COMMON_FLAGS, machine or platform.machine(), platform.system(), texts))
    return f"monotape-blocks-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def build(folder: Path, compiler: list[str] | None, machine: str | None = None) -> Path:
    """Compiles it into `folder`, whole or not at all. `machine`: what the compiler compiles for."""
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++ or clang++) was found")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library_name(machine)
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        command = [*compiler, *COMMON_FLAGS, "-shared", *sources, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{compiler[0]} failed: {done.stderr.strip()}")
        return made.replace(folder / made.name)
