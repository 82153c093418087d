"""The schemes that compressed-tensors knows by a name: {"W4A16": ["Linear"]} stands for a group with these weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """The section "weights" as a config would spell it out; None: the modules stay as they are."""

    weights: Mapping[str, Any] | None
    activations: bool  # some are to be quantised


def _integers(bits: int, symmetric: bool = True) -> Mapping[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": symmetric,
    }


def _floats(bits: int, strategy: str, **others: Any) -> Mapping[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, **others}


_INT8 = Preset({"num_bits": 8, "type": "int", "strategy": "channel"}, True)
_NVFP4 = _floats(4, "tensor_group", group_size=16)
_MXFP4 = _floats(4, "group", group_size=32)
#: As the library has them. Until its pull request 702 of May 2026 W8A16 had a scale for each row: the shape of the
#: scales tells the two apart, and such a file is refused for it.
PRESETS: Mapping[str, Preset] = {
    "UNQUANTIZED": Preset(None, False),
    "W4A16": Preset(_integers(4), False),
    "W4A16_ASYM": Preset(_integers(4, symmetric=False), False),
    "W4A8": Preset(_integers(4), True),
    "W4A4": Preset(_integers(4), True),
    "W4AFP8": Preset(_integers(4), True),
    "W8A16": Preset(_integers(8), False),
    "W8A8": _INT8,
    "INT8": _INT8,
    "FP8": Preset(_floats(8, "tensor"), True),
    "FP8_DYNAMIC": Preset(_floats(8, "channel"), True),
    "FP8_BLOCK": Preset(_floats(8, "block", block_structure=[128, 128]), True),
    "NVFP4A16": Preset(_NVFP4, False),
    "NVFP4": Preset(_NVFP4, True),
    "MXFP4A16": Preset(_MXFP4, False),
    "MXFP4": Preset(_MXFP4, True),
    "MXFP4XFP8": Preset(_MXFP4, True),
}
