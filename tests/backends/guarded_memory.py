"""Memory that ends at a guard page: an access past its end is a fault at once, as on a GPU under a memory checker."""

from __future__ import annotations

import ctypes
import mmap

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_NO_ACCESS = 0
_VECTOR = 16  # bytes of the longest access of the kernel


class GuardedMemory:
    """Aligned as its size is, up to the kernel's longest access, so that it ends where a page ends."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        inside = max(1, -(-size // page)) * page
        self._map = mmap.mmap(-1, inside + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_uint8.from_buffer(self._map))
        for guard in (start, start + page + inside):
            code = _LIBRARY.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), _NO_ACCESS)
            assert code == 0, f"mprotect: error {ctypes.get_errno()}"
        self.address, self.size = start + page + inside - size, size
        assert size % _VECTOR or self.address % _VECTOR == 0

    def close(self) -> None:
        """From here on every access faults, wherever in it."""
        self._map.close()
