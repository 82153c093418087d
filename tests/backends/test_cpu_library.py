"""The native library of a development install: what a user reads while it is built, and where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from monotape.backends.cpu import bridge
from monotape.errors import BackendUnavailable


def test_a_long_build_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first answer in a clone took minutes without a word."""
    monkeypatch.setattr(bridge, "build", lambda folder, _compiler: folder / "library.so")
    monkeypatch.setattr(bridge, "find_compiler", lambda _preferred: ["c++"])
    assert bridge._build(tmp_path) == tmp_path / "library.so"
    assert "Compiling the CPU's kernels" in caplog.text


def test_no_build_without_a_compiler_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bridge, "find_compiler", lambda _preferred: None)
    with pytest.raises(bridge.BuildError):
        bridge._build(tmp_path)
    assert not caplog.text


def test_a_folder_that_cannot_be_written_is_not_taken_for_a_missing_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "find_compiler", lambda _preferred: ["c++"])
    (tmp_path / "file").touch()
    with pytest.raises(BackendUnavailable, match="cannot be written into") as caught:
        bridge._build(tmp_path / "file" / "native")
    assert "Not a directory" in caught.value.message and "MONOTAPE_CACHE" in caught.value.hint


def test_a_compiler_that_cannot_be_started_is_not_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_bytes(b"\x7fELF, but no more")
    compiler.chmod(0o755)
    monkeypatch.setattr(bridge, "find_compiler", lambda _preferred: [str(compiler)])
    with pytest.raises(bridge.BuildError, match=r"c\+\+ cannot be started: Exec format error"):
        bridge._build(tmp_path / "native")
