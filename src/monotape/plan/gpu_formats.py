"""Formats of weights that the GPU kernel reads: one entry for each, beside its header in kernels/formats/."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.plan.formats import Format
from monotape.plan.types import Stage as PlannedStage


@dataclass(frozen=True, slots=True)
class GpuFormat:
    """How the kernel reads weights of one format: a header of kernels/formats/, and what products take."""

    name: str  # in the kernel's enumeration
    half: Format  # the 16-bit float that a block's values become
    stored: str  # the C++ type that reads it
    words: int  # of 32 bits that a lane has of a block
    header: str | None = None  # of kernels/formats/, that has the type
    integers: bool = False  # whether a token's products are of integers


def scale_name(stage: PlannedStage) -> str:
    """The vector of scales of a quantised stage's rows."""
    return f"{stage.name}_scale"


#: Words of 32 bits that a lane has of a block.
_CODE_WORDS = {"FourBits": 4, "FiveBits": 5, "SixBits": 6, "Bytes": 8, "E4m3": 8, "E2m1": 4}
_SCALE_WORDS = {
    "HalfScales": 1, "PairScales": 1, "KScales": 2, "SixBitScales": 2, "MixedKScales": 2, "WideScales": 4,
    "PowerScales": 1, "FloatScales": 1, "RowScales": 0,
}  # fmt: skip


def _groups(name: str, codes: str, scales: str) -> GpuFormat:
    """Codes with scales along k: types of kernels/formats/codes.h and scales.h."""
    words = _CODE_WORDS[codes] + _SCALE_WORDS[scales.split("<")[0]]
    integers = codes not in ("E4m3", "E2m1")
    return GpuFormat(name, Format.BF16, f"StoredGroups<{codes}, {scales}>", words, "groups", integers)


#: Every format that a stage's tape may have on a GPU.
GPU_FORMATS = {
    Format.BF16: GpuFormat("bf16", Format.BF16, "StoredHalf<false>", 4),
    Format.F16: GpuFormat("f16", Format.F16, "StoredHalf<true>", 4),
    Format.FP8: _groups("fp8", "E4m3", "RowScales<0>"),
    Format.FP8_BLOCK: _groups("fp8_block", "E4m3", "FloatScales"),
    Format.INT8: _groups("int8", "Bytes", "RowScales<128>"),
    Format.INT4_G32: _groups("int4_g32", "FourBits", "HalfScales<32, 8>"),
    Format.INT4_G64: _groups("int4_g64", "FourBits", "HalfScales<64, 8>"),
    Format.INT4_G128: _groups("int4_g128", "FourBits", "HalfScales<128, 8>"),
    Format.INT4_G32Z: _groups("int4_g32z", "FourBits", "PairScales<32, true>"),
    Format.INT4_G64Z: _groups("int4_g64z", "FourBits", "PairScales<64, true>"),
    Format.INT4_G128Z: _groups("int4_g128z", "FourBits", "PairScales<128, true>"),
    Format.MXFP4: _groups("mxfp4", "E2m1", "PowerScales"),
    Format.Q8: _groups("q8", "Bytes", "HalfScales<32, 128>"),
    Format.Q4_1: _groups("q4_1", "FourBits", "PairScales<32, false>"),
    Format.Q5_0: _groups("q5_0", "FiveBits", "HalfScales<32, 16>"),
    Format.Q4_K: _groups("q4_k", "FourBits", "KScales"),
    Format.Q5_K: _groups("q5_k", "FiveBits", "KScales"),
    Format.Q6_K: _groups("q6_k", "SixBits", "SixBitScales"),
    Format.K_MIXED: _groups("k_mixed", "SixBits", "MixedKScales"),
    Format.WIDE: _groups("wide", "Bytes", "WideScales"),
}
