"""The one place where environment variables are read."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where downloads, built libraries and measured machine figures are kept."""
    if override := os.environ.get("MONOTAPE_CACHE"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "monotape"


def cxx_compiler() -> str | None:
    """The C++ compiler the user asked for, if any."""
    return os.environ.get("CXX") or None


def rocm_path() -> Path:
    """Where AMD's ROCm is installed, if it is."""
    return Path(os.environ.get("ROCM_PATH") or "/opt/rocm")


def api_key() -> str | None:
    """The server's key, where no flag gives one: every user can read a command line with `ps`."""
    return os.environ.get("MONOTAPE_API_KEY") or None


def forced_isa() -> str | None:
    """A CPU kernel set to use instead of the best one ("portable", "neon", "avx2" ...), for tests and comparisons."""
    return os.environ.get("MONOTAPE_ISA") or None


def told_commit() -> str:
    """The commit of sources that were copied without their history, with a + if they were changed; "" if not told."""
    return os.environ.get("MONOTAPE_COMMIT", "")
