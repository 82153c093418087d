"""What a download must know of the disk: how much is free, whether an error means that it is full."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from monotape.errors import ResourceError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or whatever caused it, says that the disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if "No space left on device" in str(error):  # native downloaders keep the words but not the number
            return True
        error = error.__cause__ or error.__context__
    return False


def full_disk(what: str, needed: int, folder: Path) -> ResourceError:
    """The error for a download that does not fit."""
    return ResourceError(
        f"The disk is full: {what} needs {needed:,} bytes and {free_bytes(folder):,} are free in {folder}.",
        "Make room there or move the cache (MONOTAPE_CACHE, HF_HOME); nothing of the download was kept.",
    )


def entries(folder: Path) -> set[Path]:
    """All paths below a folder, for a later `remove_new`."""
    return set(folder.rglob("*")) if folder.is_dir() else set()


def remove_new(folder: Path, before: set[Path]) -> None:
    """Removes what appeared below a folder since `before` was taken, and the folder itself if it is empty."""
    for path in sorted(entries(folder) - before, reverse=True):  # children before their parents
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
