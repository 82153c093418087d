"""A file in memory without a copy: a read-only map whose every slice is checked against the file's length."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError


class MappedFile:
    """The bytes of one file. Offsets and lengths are Python integers, so no sum of them can wrap around."""

    __slots__ = ("_address", "_map", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise CheckpointError(
                        f"{path} is empty.", "The download was probably cut off: fetch it again."
                    )
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist.", "Check the path.") from None
        except IsADirectoryError:
            raise CheckpointError(
                f"{path} is a folder where a file is expected.", "Check the path."
            ) from None
        except (OSError, ValueError) as error:
            # ValueError: a path with a NUL, or a file whose length changed between seek and map.
            raise CheckpointError(f"{path} cannot be read: {error}.", "Check its permissions.") from error
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data

    @property
    def buffer(self) -> mmap.mmap:
        """All bytes, for loops that do their own checking."""
        return self._map

    def array(self, offset: int, length: int, what: str) -> NDArray[np.uint8]:
        """A view of `length` bytes. `what` names them in the error when the file is too short."""
        self.require(offset, length, what)
        return np.frombuffer(self._map, np.uint8, length, offset) if length else np.empty(0, np.uint8)

    def copy(self, offset: int, length: int, what: str) -> bytes:
        """A copy of `length` bytes; for small things."""
        self.require(offset, length, what)
        return self._map[offset : offset + length]

    def unpack(self, form: Struct, offset: int, what: str) -> tuple[Any, ...]:
        self.require(offset, form.size, what)
        return form.unpack_from(self._map, offset)

    def require(self, offset: int, length: int, what: str) -> None:
        """Refuses a slice that is not wholly inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            end = offset + length
            raise CheckpointError(
                f"{self.path}: {what} lies at bytes {offset} to {end}, but the file has {self.size} bytes.",
                "It is truncated or damaged: fetch it again.",
            )

    def release(self, offset: int, length: int) -> None:
        """Takes every page that touches the range out of this process's memory.

        The map is read-only and backed by the file, so nothing is lost: a page that a neighbour still needs
        comes back from the page cache when it is touched again.
        """
        self.require(offset, length, "a range to release")
        advice = getattr(mmap, "MADV_DONTNEED", None)  # absent where the system has no madvise
        if advice is None or length == 0:
            return
        first = offset - offset % mmap.PAGESIZE
        _madvise()(self._address + first, offset + length - first, advice)


@cache
def _madvise() -> Any:
    """The system's own: mmap's keeps Python's lock, for milliseconds in which no other thread of a loader gets on."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
