"""Writing files so that a full disk costs nothing that was there before, and is told in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from monotape.errors import ResourceError
from monotape.weights.disk import free_bytes, is_full


@contextmanager
def told_if_full(folder: Path, what: str) -> Iterator[None]:
    """Turns the errors of a full disk into one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # PyTorch's writer raises a RuntimeError
        if not is_full(error):
            raise
        raise ResourceError(
            f"The disk is full: {what[0].lower()}{what[1:]} could not be written to {folder}, where "
            f"{free_bytes(folder):,} bytes are free.",
            "Make room there and run the same command again; what was saved before is untouched.",
        ) from None


def replace_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file beside `path` and renames it: a reader finds the old file or the new one, never half of either."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        write(unfinished)
        with unfinished.open("rb") as opened:
            os.fsync(opened.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
