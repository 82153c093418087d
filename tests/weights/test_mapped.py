"""weights/mapped.py: slices stay inside the file, and released pages leave memory."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from struct import Struct

import numpy as np
import pytest

from monotape.errors import CheckpointError
from monotape.weights.mapped import MappedFile


@pytest.fixture
def numbered(tmp_path: Path) -> MappedFile:
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes(range(251)))
    return MappedFile(path)


def test_slices_are_the_bytes_of_the_file(numbered: MappedFile) -> None:
    assert numbered.size == 251
    assert numbered.array(13, 7, "x").tolist() == list(range(13, 20))
    assert numbered.copy(248, 3, "x") == bytes([248, 249, 250])
    assert numbered.unpack(Struct("<H"), 1, "x") == (0x0201,)


def test_an_empty_slice_may_lie_at_the_end(numbered: MappedFile) -> None:
    assert numbered.array(251, 0, "x").shape == (0,)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 252), (251, 1), (-1, 2), (3, -1), (2**63, 2**63), (2**64 - 8, 16), (1, 2**64)]
)
def test_slices_outside_the_file_are_refused(numbered: MappedFile, offset: int, length: int) -> None:
    with pytest.raises(CheckpointError, match=r"the thing lies at bytes .* has 251 bytes"):
        numbered.array(offset, length, "the thing")
    with pytest.raises(CheckpointError, match="the thing"):
        numbered.copy(offset, length, "the thing")
    with pytest.raises(CheckpointError, match="a range to release"):
        numbered.release(offset, length)


def test_a_number_across_the_end_is_refused(numbered: MappedFile) -> None:
    with pytest.raises(CheckpointError, match="the length"):
        numbered.unpack(Struct("<Q"), 244, "the length")


def test_views_cannot_be_written(numbered: MappedFile) -> None:
    assert not numbered.array(0, 5, "x").flags.writeable


def test_missing_folder_and_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        MappedFile(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is a folder"):
        MappedFile(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        MappedFile(tmp_path / "empty")


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", locked)
    with pytest.raises(CheckpointError, match=r"secret cannot be read: .*Permission denied"):
        MappedFile(tmp_path / "secret")


def _resident_pages(path: Path) -> int:
    """Pages of the file that are in this process's memory."""
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(path)):
            mine = True
        elif mine and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024 // mmap.PAGESIZE
    raise AssertionError(f"{path} is not mapped")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")
def test_released_pages_leave_memory_and_come_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "pages.bin"
    values = np.random.default_rng(5).integers(0, 256, 300 * mmap.PAGESIZE + 77, dtype=np.uint8)
    path.write_bytes(values.tobytes())
    mapped = MappedFile(path)
    assert int(mapped.array(0, mapped.size, "all").sum()) == int(values.sum())
    assert _resident_pages(path) == 301
    mapped.release(mmap.PAGESIZE + 9, 200 * mmap.PAGESIZE)
    assert _resident_pages(path) == 100
    mapped.release(0, mapped.size)
    assert _resident_pages(path) == 0
    assert np.array_equal(mapped.array(0, mapped.size, "all"), values)
