"""The formats of weights, and how each lies on a tape: a row's block of values along k, and its bytes.

A format says what the numbers are. How they lie differs between machines, because their kernels read differently: a CPU
has a layout and a GPU has a layout of the same format, and the numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TILE_ROWS = 8  # output rows that are packed, read and summed together; the lanes of one wide register


class Format(Enum):
    """What weights are. q is a stored integer, d and m are float16, groups lie along k."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, a scale a row
    FP8_BLOCK = "fp8-block"  # e4m3, a float32 scale for each group of 128
    INT8 = "int8"  # q - 128, a scale a row
    INT4_G32 = "int4-g32"  # (q - 8) d for each group of 32 along k: GGUF's Q4_0
    INT4_G64 = "int4-g64"
    INT4_G128 = "int4-g128"
    INT4_G32Z = "int4-g32z"  # (q - z) d: the same with a zero point a group
    INT4_G64Z = "int4-g64z"
    INT4_G128Z = "int4-g128z"
    MXFP4 = "mxfp4"  # e2m1, a power of two for each group of 32
    Q8 = "q8"  # (q - 128) d for each group of 32: GGUF's Q8_0
    Q4_1 = "q4_1"  # q d + m for each group of 32
    Q5_0 = "q5_0"  # (q - 16) d for each group of 32
    Q4_K = "q4_k"  # q d s - e m for each group of 32: s and m have six bits, d and e are of 256 values
    Q5_K = "q5_k"
    Q6_K = "q6_k"  # (q - 32) d s for each group of 16: s has eight bits, d is of 256 values
    K_MIXED = "k-mixed"  # q d s - e m for each group of 16, q of six bits: holds Q4_K, Q5_K and Q6_K
    WIDE = "wide"  # q s + m, q of eight bits, float32 s and m for each group of 16: holds every format of integers

    @property
    def is_half(self) -> bool:
        """Whether a value is a 16-bit float."""
        return self in (Format.F16, Format.BF16)


@dataclass(frozen=True, slots=True)
class Layout:
    """A row's block on a tape: values along k that lie together, and their bytes, scales included."""

    k: int  # k is padded to a multiple of it
    bytes: int
    row_scales: bool = False  # every row has a scale beside the tape, a float32

    def padded(self, k: int) -> int:
        return -(-k // self.k) * self.k

    @property
    def block_bytes(self) -> int:
        """Bytes of a tile's block."""
        return TILE_ROWS * self.bytes

    def tile_bytes(self, k: int) -> int:
        """Bytes of one tile: TILE_ROWS rows of k (padded) values."""
        return k // self.k * self.block_bytes


CPU_LAYOUTS = {
    Format.F32: Layout(1, 4),
    Format.F16: Layout(1, 2),
    Format.BF16: Layout(1, 2),
    Format.Q8: Layout(32, 32 + 2),
    Format.INT4_G32: Layout(32, 16 + 2),
    Format.INT4_G64: Layout(64, 32 + 2),
    Format.INT4_G128: Layout(128, 64 + 2),
    Format.INT4_G32Z: Layout(32, 16 + 4),
    Format.INT4_G64Z: Layout(64, 32 + 4),
    Format.INT4_G128Z: Layout(128, 64 + 4),
    Format.MXFP4: Layout(32, 16 + 1),
    Format.Q4_1: Layout(32, 16 + 4),
    Format.Q5_0: Layout(32, 20 + 2),
    Format.Q4_K: Layout(128, 64 + 4 + 8),
    Format.Q5_K: Layout(128, 80 + 4 + 8),
    Format.Q6_K: Layout(128, 96 + 2 + 8),
    Format.K_MIXED: Layout(128, 96 + 4 + 16),
    Format.WIDE: Layout(32, 32 + 16),
}

#: A GPU's blocks have whole groups of 32 values, of which tensor cores take one at a time, in whole words of 16 bytes.
GPU_LAYOUTS = {
    Format.F16: Layout(32, 64),
    Format.BF16: Layout(32, 64),
    Format.FP8: Layout(128, 128, row_scales=True),
    Format.FP8_BLOCK: Layout(128, 128 + 4),
    Format.INT8: Layout(128, 128, row_scales=True),
    Format.INT4_G32: Layout(128, 64 + 8, row_scales=True),
    Format.INT4_G64: Layout(128, 64 + 4, row_scales=True),
    Format.INT4_G128: Layout(128, 64 + 2, row_scales=True),
    Format.INT4_G32Z: Layout(128, 64 + 16, row_scales=True),
    Format.INT4_G64Z: Layout(128, 64 + 8, row_scales=True),
    Format.INT4_G128Z: Layout(128, 64 + 4, row_scales=True),
    Format.MXFP4: Layout(128, 64 + 4),
    Format.Q8: Layout(128, 128 + 8),
    Format.Q4_1: Layout(128, 64 + 16),
    Format.Q5_0: Layout(128, 64 + 16 + 8),
    Format.Q4_K: Layout(128, 64 + 12),
    Format.Q5_K: Layout(128, 64 + 16 + 12),
    Format.Q6_K: Layout(128, 64 + 32 + 10),
    Format.K_MIXED: Layout(128, 64 + 32 + 20),
    Format.WIDE: Layout(128, 128 + 64),
}

LAYOUTS = {"cpu": CPU_LAYOUTS, "cuda": GPU_LAYOUTS, "hip": GPU_LAYOUTS}
