"""The native packer, as weights/tapes.py calls it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.bridge import FORMAT_CODES, library
from monotape.plan.formats import CPU_LAYOUTS, Format
from monotape.weights.tapes import Bytes


class NativePacker:
    """Lays rows out as kernels_impl.h reads them."""

    def pack(self, fmt: Format, rows: NDArray[np.float32], out: Bytes) -> int:
        assert out.flags.c_contiguous and rows.flags.c_contiguous
        assert out.nbytes == rows.shape[0] // 8 * CPU_LAYOUTS[fmt].tile_bytes(rows.shape[1])
        code = FORMAT_CODES[fmt]
        return int(library().monotape_pack_tiles(code, rows.ctypes.data, *rows.shape, out.ctypes.data))

    def pack_integers(self, integers: NDArray[np.int8], scales: NDArray[np.float16], out: Bytes) -> int:
        assert out.flags.c_contiguous and integers.flags.c_contiguous and scales.flags.c_contiguous
        assert out.nbytes == integers.shape[0] // 8 * CPU_LAYOUTS[Format.Q8].tile_bytes(integers.shape[1])
        return int(
            library().monotape_pack_q8_tiles(
                integers.ctypes.data, scales.ctypes.data, *integers.shape, out.ctypes.data
            )
        )

    def pack_table(self, fmt: Format, rows: NDArray[np.float32], out: Bytes) -> int:
        """Rows one after another, for an embedding that is no part of a tape."""
        assert out.flags.c_contiguous and rows.flags.c_contiguous
        code = FORMAT_CODES[fmt]
        return int(library().monotape_pack_table(code, rows.ctypes.data, *rows.shape, out.ctypes.data))
