"""A packed model becomes a folder in the cache: in any locale, and beside other processes that do the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from monotape.embedded.packed import WEIGHTS, PackedModel, unpacked, write
from monotape.errors import ResourceError

TEXTS = {"config.json": "{}", "README.md": "Größe: 3 µm\n", "tokenizer.json": "{}\n" * 9}
UNPACK = """
import sys
from pathlib import Path
from monotape.embedded.packed import unpacked
print(unpacked(*map(Path, sys.argv[1:])))
"""


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "small.safetensors"
    values = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    write(path, PackedModel(TEXTS, {"rows": values, "gains": values[0, :7]}), {"rows": 4, "gains": 32})
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_locale_without_utf_8_unpacks_the_same_bytes_once(packed_file: Path, tmp_path: Path) -> None:
    expected = contents(unpacked(packed_file, tmp_path / "here"))
    assert expected["README.md"].decode() == TEXTS["README.md"]
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", UNPACK, str(packed_file), str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plain})
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert contents(folder) == expected
    made = {file.name: file.stat().st_ino for file in folder.iterdir()}
    assert unpacked(packed_file, tmp_path / "there") == folder
    assert {file.name: file.stat().st_ino for file in folder.iterdir()} == made


def test_mending_a_folder_takes_nothing_away_from_its_readers(packed_file: Path, tmp_path: Path) -> None:
    folder = unpacked(packed_file, tmp_path)
    expected, inode = contents(folder), folder.stat().st_ino
    (folder / WEIGHTS).write_bytes(b"")
    with (folder / "config.json").open("rb") as reader:
        assert unpacked(packed_file, tmp_path) == folder
        assert reader.read() == expected["config.json"]
    assert (contents(folder), folder.stat().st_ino) == (expected, inode)
    assert list(tmp_path.iterdir()) == [folder]


def test_several_that_find_a_damaged_folder_all_get_a_whole_one(packed_file: Path, tmp_path: Path) -> None:
    folder = unpacked(packed_file, tmp_path)
    expected, failures = contents(folder), []
    together = threading.Barrier(4)

    def use() -> None:
        together.wait()
        try:
            if contents(unpacked(packed_file, tmp_path)) != expected:
                failures.append("not whole")
        except OSError as error:
            failures.append(repr(error))

    for _ in range(30):
        (folder / "tokenizer.json").unlink()
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_in_the_place_of_the_folder_is_one_sentence(packed_file: Path, tmp_path: Path) -> None:
    folder = unpacked(packed_file, tmp_path / "named")
    (tmp_path / folder.name).write_text("in the way")
    with pytest.raises(ResourceError, match="cannot be unpacked into") as caught:
        unpacked(packed_file, tmp_path)
    assert "MONOTAPE_CACHE" in caught.value.hint
