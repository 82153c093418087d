"""A C++ compiler that makes no object twice: compilers/c++, a folder that tests put before the others of PATH.

A wheel, the library of a checkout and the tests of its kernels compile the same files with the same flags, for more
than a minute each. An object is kept under a hash of its source after the preprocessor, of its flags and of the
compiler. Every other command goes to the compiler as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "compilers"
UNUSED_S = 86_400  # an object that nothing has asked for so long is removed


def enter() -> None:
    """From here on, of this process and of those that it starts."""
    if compiler() is not None and shutil.which("python3"):  # what compilers/c++ starts
        os.environ["PATH"] = os.pathsep.join([str(FOLDER), *other_folders()])


def objects() -> Path:
    """Where they are kept from run to run: in Monotape's cache."""
    cache = os.environ.get("MONOTAPE_CACHE") or Path.home() / ".cache" / "monotape"  # config.py: cache_dir
    return Path(cache) / "objects"


def other_folders() -> list[str]:
    return [folder for folder in os.get_exec_path() if Path(folder).resolve() != FOLDER]


def compiler() -> str | None:
    """The one that comes next in PATH."""
    return shutil.which("c++", path=os.pathsep.join(other_folders()))


def object_of(arguments: list[str]) -> tuple[list[str], Path] | None:
    """What says how one source becomes an object, and the object's path. None: the command makes something else."""
    if "-c" not in arguments or arguments.count("-o") != 1 or arguments[-1] == "-o":
        return None
    place = arguments.index("-o")
    return arguments[:place] + arguments[place + 2 :], Path(arguments[place + 1])


def key_of(command: list[str]) -> str | None:
    """A hash of all that the object depends on; None where the preprocessor fails, of which the compiler tells more."""
    without = [word for word in command if word != "-c"]
    text = subprocess.run([*without, "-E", "-P"], capture_output=True, check=False)
    if text.returncode:
        return None
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    flags = [word for word in without if not word.endswith(".cpp") and not word.startswith("-I")]
    return hashlib.sha256(repr((flags, version, text.stdout)).encode()).hexdigest()[:32]


def compile_once(command: list[str], key: str, made: Path) -> int:
    """Copies the object that is kept to `made`, after it has been compiled if need be; the compiler's exit code."""
    folder = objects()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{key}.o"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                whole = Path(scratch, kept.name)
                if code := subprocess.run([*command, "-o", str(whole)], check=False).returncode:
                    return code
                whole.replace(kept)
            remove_unused(folder)
        os.utime(kept)
        shutil.copyfile(kept, made)
    return 0


def remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        try:
            if path.suffix in (".o", ".lock") and time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
        except FileNotFoundError:  # another process was first
            pass


def main(arguments: list[str]) -> int:
    if (real := compiler()) is None:
        return 127
    if (wanted := object_of(arguments)) is not None:
        command = [real, *wanted[0]]
        if (key := key_of(command)) is not None:
            return compile_once(command, key, wanted[1])
    os.execv(real, [real, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
