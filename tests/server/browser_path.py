"""Which browser the tests of the playground run in; `python tests/server/browser_path.py` gets one if there is none.

A Chromium of the system, or the one that Playwright downloads. Every attempt to get one has a time limit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "MONOTAPE_REQUIRE_BROWSER"  # set in CI: tests that need a browser fail without one
DOWNLOAD_S, PACKAGE_S = 180, 600
_FALLBACK = "install one, for example with `apt install chromium`"


def find_browser() -> str | None:
    """The program, or None."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or _downloaded()


def is_required() -> bool:
    return os.environ.get(REQUIRED, "") not in ("", "0")


def _downloaded() -> str | None:
    """Playwright's own, where it keeps it."""
    code = (
        "from playwright.sync_api import sync_playwright\n"
        "with sync_playwright() as p: print(p.chromium.executable_path)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    path = done.stdout.strip()
    return path if path and Path(path).is_file() else None


def get_browser() -> str | None:
    """Playwright's download first; where that cannot be reached, the package of a Debian or Ubuntu."""
    print("There is no Chromium: trying Playwright's download ...", flush=True)
    _run([sys.executable, "-m", "playwright", "install", "chromium"], DOWNLOAD_S)
    if (found := find_browser()) is not None:
        return found
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get") is None or (as_root and shutil.which("sudo") is None):
        return None
    print("The download failed: trying the system's package ...", flush=True)
    _run([*as_root, "apt-get", "update", "-qq"], PACKAGE_S)
    _run([*as_root, "apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], PACKAGE_S)
    return find_browser()


def _run(command: list[str], limit_s: float) -> bool:
    """Runs it for so long at most, and ends what it has started too."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError:
        return False
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def main() -> int:
    found = find_browser() or get_browser()
    if found is not None:
        print(f"Browser tests run in {found}.")
        return 0
    print(
        f"\n*** NO BROWSER: the tests of the playground will NOT RUN. Get one: {_FALLBACK}. ***\n",
        file=sys.stderr,
    )
    return 1 if is_required() else 0


if __name__ == "__main__":
    sys.exit(main())
