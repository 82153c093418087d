"""The native packer, as weights/tapes.py calls it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.bridge import FORMAT_CODES, library
from monotape.plan.formats import CPU_LAYOUTS, Format
from monotape.weights.coded import Coded
from monotape.weights.raw import RawMatrix
from monotape.weights.tapes import Bytes

#: Blocks of GGUF files: their number in cuda/native/gguf_row.h (Kind), and the formats that native code packs them as.
_RAW = {
    "q4_0": (3, (Format.INT4_G32, Format.Q5_0, Format.Q8)),
    "q4_1": (4, (Format.Q4_1,)),
    "q5_0": (5, (Format.Q5_0, Format.Q8)),
    "q8_0": (6, (Format.Q8,)),
    "q4_k": (8, (Format.Q4_K, Format.Q5_K, Format.K_MIXED)),
    "q5_k": (9, (Format.Q5_K, Format.K_MIXED)),
    "q6_k": (10, (Format.Q6_K, Format.K_MIXED)),
}
_MOST_EXPONENT = 253  # of MXFP4: native/scales_impl.h


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

    def pack_codes(self, fmt: Format, rows: CodeRows, out: Bytes) -> int:
        """Rows of codes and scales. Returns the first row with a scale that is not finite, or -1."""
        layout = CPU_LAYOUTS[fmt]
        count, k = rows.codes.shape
        assert out.flags.c_contiguous and out.nbytes == count // 8 * layout.tile_bytes(k)
        parts = (rows.codes, rows.d, rows.e, rows.s, rows.m, rows.scales, rows.minima)
        assert all(part is None or (part.flags.c_contiguous and len(part) == count) for part in parts)
        pointers = (None if part is None else part.ctypes.data for part in parts)
        return int(library().monotape_pack_codes(FORMAT_CODES[fmt], count, k, *pointers, out.ctypes.data))

    def reads_raw(self, fmt: Format, kind: str) -> bool:
        return kind in _RAW and fmt in _RAW[kind][1]

    def pack_raw(
        self,
        fmt: Format,
        raw: RawMatrix,
        order: NDArray[np.int64],
        columns: tuple[int, int],
        padded_k: int,
        out: Bytes,
    ) -> int:
        """Tiles straight from the mapped file; row i is row order[i] of it, or -1 where it only fills a tile."""
        first, end = columns
        assert out.flags.c_contiguous and out.nbytes == len(order) // 8 * CPU_LAYOUTS[fmt].tile_bytes(
            padded_k
        )
        assert (
            order.max() < len(raw.rows) and end <= raw.columns and first % min(128, CPU_LAYOUTS[fmt].k) == 0
        )
        return int(
            library().monotape_pack_raw(
                FORMAT_CODES[fmt], _RAW[raw.kind][0], raw.rows.ctypes.data, raw.rows.strides[0], order.ctypes.data,
                len(order), first, end - first, padded_k, out.ctypes.data,
            )
        )  # fmt: skip

    def pack_coded(self, fmt: Format, rows: Coded, out: Bytes) -> int:
        if fmt is Format.MXFP4:  # most values of a block with a larger exponent are not finite
            wrong = (rows.of_groups[0] > _MOST_EXPONENT).any(axis=1)
            if wrong.any():
                return int(np.argmax(wrong))
        return self.pack_codes(fmt, code_rows(fmt, rows), out)


@dataclass(frozen=True, slots=True, eq=False)
class CodeRows:
    """Rows as native/pack_codes.h takes them. Which fields are set depends on the format: native/formats.h."""

    codes: NDArray[np.uint8]  # [rows, padded k]
    d: NDArray[np.float16] | None = None  # [rows, blocks of the layout]
    e: NDArray[np.float16] | None = None
    s: NDArray[np.int8] | None = None  # [rows, groups of 16 or 32]
    m: NDArray[np.int8] | None = None
    scales: NDArray[np.float32] | None = None  # [rows, groups of 16]
    minima: NDArray[np.float32] | None = None


def code_rows(fmt: Format, rows: Coded) -> CodeRows:
    """A checkpoint's rows in the words of the packer."""
    first, second = (*(np.ascontiguousarray(plane) for plane in rows.of_groups), None, None)[:2]
    d, e = (*(np.ascontiguousarray(plane) for plane in rows.of_rows), None, None)[:2]
    codes = np.ascontiguousarray(rows.codes)
    if fmt is Format.WIDE:
        return CodeRows(codes, scales=first, minima=second)
    if fmt is Format.MXFP4:
        assert first is not None
        return CodeRows(
            codes, s=(first ^ np.uint8(0x80)).view(np.int8)
        )  # the packer adds 128 to what is signed
    if rows.of_rows:
        return CodeRows(codes, d, e, first, second)
    assert rows.row_scales is None or np.isin(rows.row_scales, (0, 1)).all(), (
        "rows that only fill a tile have 0"
    )
    return CodeRows(codes, first, second)
