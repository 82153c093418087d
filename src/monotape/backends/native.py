"""Finds a backend's native library: the one that came with the package, one that was built before, or one built now."""

from __future__ import annotations

from pathlib import Path

from monotape.backends.cpu.build import build, find_compiler, library_name
from monotape.config import cache_dir, cxx_compiler


def find_library(sources: Path) -> Path:
    """The library made of the sources in a folder. An installed one lies beside that folder."""
    name, cache = library_name(sources), cache_dir() / "native"
    for candidate in (sources.parent / name, cache / name):
        if candidate.exists():
            return candidate
    return build(cache, find_compiler(cxx_compiler()), sources)
