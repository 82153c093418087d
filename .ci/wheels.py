"""Builds the wheels of both Linux machines into dist/, and checks that each is what its name says.

    make wheel

zig compiles for either machine on any, against the symbols of glibc 2.17, and brings its own C++ library; auditwheel
then reads off the libraries which systems they really run on.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
GLIBC = (2, 17)
MACHINES = ("x86_64", "aarch64")


def tag(machine: str) -> str:
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"


def zig() -> Path:
    """The compiler itself: pip hides other packages from a build."""
    import ziglang

    return Path(ziglang.__file__).with_name("zig")


def build(machine: str) -> Path:
    """One wheel, which has both libraries or is not made."""
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    environment = {
        **os.environ,
        "MONOTAPE_WHEEL_MACHINE": machine,
        "MONOTAPE_WHEEL_PLATFORM": tag(machine),
        "CXX": f"{zig()} c++ -target {target} -s",
    }
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(DIST),
        str(ROOT),
    ]
    subprocess.run(command, check=True, env=environment)
    (made,) = DIST.glob(f"monotape-*-py3-none-{tag(machine)}.whl")
    return made


def check(wheel: Path, machine: str) -> None:
    """The libraries are for that machine and need nothing that its platform tag does not promise."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert len(libraries) == 2, libraries
        codes = {int.from_bytes(archive.read(name)[18:20], "little") for name in libraries}  # e_machine
    assert codes == {{"x86_64": 62, "aarch64": 183}[machine]}, codes
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    found = re.search(
        rf'consistent with the following platform tag: "manylinux_(\d+)_(\d+)_{machine}"', shown
    )
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        sys.exit(f"{wheel.name} is not what its name says: {shown}")


def main() -> None:
    if platform.system() != "Linux":
        sys.exit("Wheels are built on Linux.")
    shutil.rmtree(DIST, ignore_errors=True)
    for machine in MACHINES:
        wheel = build(machine)
        check(wheel, machine)
        print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
