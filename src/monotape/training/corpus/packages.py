"""Packages of Python sources: wheels, or folders, each with the metadata that names its licence."""

from __future__ import annotations

import email.parser
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath

from monotape.errors import UsageError
from monotape.training.corpus.licences import licence_of

MAX_FILE_BYTES = 256 * 1024  # longer files are tables or generated
DOWNLOADS = 4  # at a time


@dataclass(frozen=True, slots=True)
class Package:
    """One package: a wheel, or a folder of sources with a file METADATA."""

    name: str
    version: str
    licence: str
    path: Path

    def sources(self) -> Iterator[tuple[str, bytes]]:
        """Every Python file by its name, in a fixed order."""
        if self.path.is_dir():
            for path in sorted(self.path.rglob("*.py")):
                if path.stat().st_size <= MAX_FILE_BYTES:
                    yield path.relative_to(self.path).as_posix(), path.read_bytes()
            return
        with zipfile.ZipFile(self.path) as archive:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
                if entry.filename.endswith(".py") and entry.file_size <= MAX_FILE_BYTES:
                    yield entry.filename, archive.read(entry)


def read_packages(folder: Path) -> list[Package]:
    """All packages of a folder, by name."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder of packages.", "Give a folder of wheels: `corpus fetch` makes one."
        )
    found = [_package(path) for path in sorted(folder.iterdir()) if path.is_dir() or path.suffix == ".whl"]
    if not found:
        raise UsageError(
            f"The corpus folder {folder} has no packages: neither wheels nor folders of sources.",
            "Fill it with `python -m monotape.training corpus fetch`.",
        )
    return sorted(found, key=lambda package: package.name)


def _package(path: Path) -> Package:
    metadata = _metadata(path)
    name = str(metadata.get("Name") or path.name.split("-")[0])
    return Package(normal_name(name), str(metadata.get("Version") or "unknown"), licence_of(metadata), path)


def _metadata(path: Path) -> Message:
    parser = email.parser.BytesParser()
    if path.is_dir():
        file = path / "METADATA"
        return parser.parsebytes(file.read_bytes() if file.is_file() else b"")
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                parts = PurePosixPath(name).parts
                if len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] == "METADATA":
                    return parser.parsebytes(archive.read(name))
    except (zipfile.BadZipFile, OSError) as error:
        raise UsageError(f"{path} is not a wheel: {error}.", "Remove it, or fetch it again.") from None
    return Message()


def normal_name(name: str) -> str:
    """A package's name as registries compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch(wanted: Sequence[str], folder: Path) -> list[str]:
    """Downloads the wheels that are not there yet, with pip; gives the lines of those that have none.

    A line is a name, which any version answers and the newest is downloaded for, or `name==version`.
    Wheels alone: pip runs the code of a source archive to learn its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = {_name_and_version(path) for path in folder.glob("*.whl")}
    names = {name for name, _ in there}

    def is_there(line: str) -> bool:
        name, pinned, version = line.partition("==")
        name = normal_name(name.strip())
        return (name, version.strip()) in there if pinned else name in names

    missing = [line for line in wanted if not is_there(line)]

    def download(line: str) -> bool:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        return subprocess.run([*command, "--dest", str(folder), line], capture_output=True).returncode == 0

    with ThreadPoolExecutor(DOWNLOADS) as pool:
        done = list(pool.map(download, missing))
    return [line for line, success in zip(missing, done, strict=True) if not success]


def _name_and_version(wheel: Path) -> tuple[str, str]:
    """By its file's name."""
    name, version, *_ = [*wheel.stem.split("-"), ""]
    return normal_name(name), version
