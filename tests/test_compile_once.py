"""The compiler of the tests: it keeps an object only for the same source, headers and flags."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import compile_once

COMPILER = str(compile_once.FOLDER / "c++")

pytestmark = pytest.mark.skipif(compile_once.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.cpp").write_text('#include "a.h"\nint answer() { return NUMBER; }\n')
    (tmp_path / "a.h").write_text("#define NUMBER 6\n")
    return tmp_path


def made(folder: Path, *flags: str) -> bytes:
    """The object of a.cpp."""
    subprocess.run([COMPILER, *flags, "-c", folder / "a.cpp", "-o", folder / "a.o"], check=True)
    return (folder / "a.o").read_bytes()


def kept(folder: Path) -> int:
    return len(list((folder / "cache" / "objects").glob("*.o")))


def test_an_object_is_made_once(sources: Path) -> None:
    first = made(sources, "-O1")
    (keep,) = (sources / "cache" / "objects").glob("*.o")
    keep.write_bytes(b"kept")
    assert made(sources, "-O1") == b"kept" != first


def test_a_header_and_a_flag_count(sources: Path) -> None:
    first = made(sources, "-O1")
    assert made(sources, "-O2", "-g") != first and kept(sources) == 2
    (sources / "a.h").write_text("#define NUMBER 7\n")
    assert made(sources, "-O1") != first and kept(sources) == 3


def test_what_cannot_be_compiled_is_an_error_and_not_kept(sources: Path) -> None:
    for text in ('#include "none.h"\n', "no C++\n"):
        (sources / "a.cpp").write_text(text)
        done = subprocess.run(
            [COMPILER, "-c", sources / "a.cpp", "-o", sources / "a.o"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode and "error" in done.stderr
    assert not (sources / "a.o").exists() and kept(sources) == 0


def test_other_commands_go_to_the_compiler(sources: Path) -> None:
    (sources / "main.cpp").write_text("int answer();\nint main() { return answer(); }\n")
    subprocess.run([COMPILER, sources / "a.cpp", sources / "main.cpp", "-o", sources / "program"], check=True)
    assert subprocess.run([sources / "program"], check=False).returncode == 6 and kept(sources) == 0
