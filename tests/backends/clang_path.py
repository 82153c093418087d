"""`python tests/backends/clang_path.py` gets a clang for AMD's GPUs, if there is none, in bounded time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from monotape.backends.hip.compilation import ARCHITECTURE, find_compiler
from monotape.errors import BackendUnavailable

PACKAGES = ("clang-19", "lld-19", "llvm-19")
PACKAGE_S = 600


def get_compiler() -> str | None:
    """The one that is here, or the packages of a Debian or Ubuntu."""
    try:
        return find_compiler()
    except BackendUnavailable:
        find_compiler.cache_clear()
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get") is None or (as_root and shutil.which("sudo") is None):
        return None
    print(f"There is no clang for {ARCHITECTURE}: trying the system's packages ...", flush=True)
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        try:
            subprocess.run([*as_root, "apt-get", *command], timeout=PACKAGE_S, check=False)
        except subprocess.TimeoutExpired:
            return None
    try:
        return find_compiler()
    except BackendUnavailable:
        return None


if __name__ == "__main__":
    found = get_compiler()
    print(found or f"No clang that compiles for {ARCHITECTURE} could be installed; its tests will say so.")
    required = os.environ.get("MONOTAPE_REQUIRE_CLANG", "") not in ("", "0")
    sys.exit(1 if required and found is None else 0)
