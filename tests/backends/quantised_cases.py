"""Small models whose matrices are rounded to every quantised format, with the numbers that the files stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from families import BY_NAME, Case, make_checkpoint
from weights.quantised_files import (
    E2M1_VALUES,
    Floats,
    Tensors,
    awq,
    e4m3_numbers,
    gptq,
    in_module,
    integers_times_scales,
    mxfp4,
    packed,
)
from weights.safetensors_files import write_file

#: Sizes that groups of 32 and words of eight divide.
EVEN = Case(
    "quantised",
    "llama",
    {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
)  # fmt: skip
GROUP = 32
Quantise = Callable[
    [Floats], tuple[Tensors, Floats]
]  # the stored tensors, and the numbers that they stand for


@dataclass(frozen=True)
class Way:
    """One way to store the matrices of a model."""

    settings: dict[str, Any]
    quantise: Quantise
    label: str
    case: Case = EVEN


def _groups(matrix: Floats, size: int, bits: int, symmetric: bool, order: list[int]) -> tuple[Any, Any, Any]:
    """Codes, zero points and f16 scales of groups of columns, by rounding to the nearest."""
    rows, columns = matrix.shape
    top, groups = (1 << bits) - 1, columns // size
    codes = np.empty((rows, columns), np.int64)
    zeros, scales = np.empty((rows, groups), np.int64), np.empty((rows, groups), np.float16)
    for g in range(groups):
        inside = [k for k in range(columns) if order[k] == g]
        part = matrix[:, inside]
        low, high = part.min(1), part.max(1)
        span = 2 * np.abs(part).max(1) if symmetric else high - low
        scales[:, g] = span / (top - 1)
        scale = scales[:, g].astype(np.float32)
        zeros[:, g] = (top + 1) // 2 if symmetric else np.clip(np.round(-low / scale), 1, top)
        codes[:, inside] = np.clip(np.round(part / scale[:, None]) + zeros[:, g, None], 0, top)
    return codes, zeros, scales


def by_awq(matrix: Floats) -> tuple[Tensors, Floats]:
    order = [k // GROUP for k in range(matrix.shape[1])]
    codes, zeros, scales = _groups(matrix, GROUP, 4, False, order)
    return awq(codes, zeros, scales), integers_times_scales(codes, zeros, scales, order)


def _by_gptq(version: int, bits: int, symmetric: bool, scattered: bool) -> Quantise:
    def quantise(matrix: Floats) -> tuple[Tensors, Floats]:
        columns = matrix.shape[1]
        order = np.arange(columns) // GROUP
        if scattered:
            order = order[np.random.default_rng(columns).permutation(columns)]
        group_of = [int(group) for group in order]
        codes, zeros, scales = _groups(matrix, GROUP, bits, symmetric, group_of)
        stored = gptq(codes, zeros, scales, group_of, bits, version)
        return stored, integers_times_scales(codes, zeros, scales, group_of)

    return quantise


def _packed_rows(bits: int, symmetric: bool) -> Quantise:
    def quantise(matrix: Floats) -> tuple[Tensors, Floats]:
        columns = matrix.shape[1]
        codes, zeros, scales = _groups(matrix, columns, bits, symmetric, [0] * columns)
        stored = packed(codes, None if symmetric else zeros, scales.astype(np.float32), bits)
        return stored, integers_times_scales(codes, zeros, scales, [0] * columns)

    return quantise


def _e4m3(values: Floats) -> NDArray[np.uint8]:
    import torch

    codes: NDArray[np.uint8] = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes


def _by_fp8(height: int | None, width: int, end: str) -> Quantise:
    """Blocks of that size; None: the whole matrix."""

    def quantise(matrix: Floats) -> tuple[Tensors, Floats]:
        rows, columns = matrix.shape
        tall, wide = (rows, columns) if height is None else (height, width)
        scales = np.empty((-(-rows // tall), -(-columns // wide)), np.float32)
        codes, numbers = np.empty(matrix.shape, np.uint8), np.empty(matrix.shape, np.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide))
                scales[i, j] = np.abs(matrix[place]).max() / 448
                codes[place] = _e4m3(matrix[place] / scales[i, j])
                numbers[place] = e4m3_numbers(codes[place]) * scales[i, j]
        stored = scales.reshape(1) if height is None else scales
        return {"weight": ("F8_E4M3", codes), end: ("F32", stored)}, numbers

    return quantise


def _by_mxfp4(matrix: Floats) -> tuple[Tensors, Floats]:
    rows, columns = matrix.shape
    codes, numbers = np.empty(matrix.shape, np.int64), np.empty(matrix.shape, np.float32)
    exponents = np.empty((rows, columns // 32), np.uint8)
    for n in range(rows):
        for b in range(columns // 32):
            part = matrix[n, 32 * b : 32 * b + 32]
            exponent = int(np.floor(np.log2(np.abs(part).max()))) - 2
            exponents[n, b] = exponent + 127
            for k, value in enumerate(part / 2.0**exponent, 32 * b):
                code = int(np.argmin([abs(abs(value) - known) for known in E2M1_VALUES]))
                codes[n, k] = code + 8 * (value < 0)
                numbers[n, k] = (-1 if value < 0 else 1) * E2M1_VALUES[code] * 2.0**exponent
    return mxfp4(codes, exponents), numbers


def _compressed(bits: int, kind: str, form: str, symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "channel", "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]
    }  # fmt: skip


def _gptq(bits: int = 4, sym: bool = True, desc_act: bool = False, form: str = "gptq") -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": sym, "desc_act": desc_act,
        "checkpoint_format": form, "damp_percent": 0.1, "true_sequential": True,
    }  # fmt: skip


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
WAYS = {
    "fp8-blocks": Way(
        {**_FP8, "weight_block_size": [16, 24]},
        _by_fp8(16, 24, "weight_scale_inv"),
        "fp8-block",
        BY_NAME["llama"],
    ),
    "autofp8": Way(_FP8, _by_fp8(None, 0, "weight_scale"), "fp8-tensor", BY_NAME["llama"]),
    "awq": Way(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, by_awq, "int4-g32"
    ),
    "gptq": Way(_gptq(), _by_gptq(1, 4, True, False), "int4-g32"),
    "gptq-v2-sorted": Way(
        _gptq(sym=False, desc_act=True, form="gptq_v2"), _by_gptq(2, 4, False, True), "int4-g32"
    ),
    "gptq-8-bits": Way(_gptq(bits=8, sym=False), _by_gptq(1, 8, False, False), "int8-g32"),
    "packed-4": Way(
        _compressed(4, "int", "pack-quantized", False),
        _packed_rows(4, False),
        "int4-channel",
        BY_NAME["llama"],
    ),
    "packed-8-qwen2": Way(
        _compressed(8, "int", "pack-quantized"), _packed_rows(8, True), "int8-channel", BY_NAME["qwen2"]
    ),
    "packed-4-phi3": Way(
        _compressed(4, "int", "pack-quantized"), _packed_rows(4, True), "int4-channel", BY_NAME["phi3"]
    ),
    "fp8-rows": Way(
        _compressed(8, "float", "float-quantized"), _by_fp8(1, 1 << 20, "weight_scale"), "fp8-channel"
    ),
    "mxfp4": Way({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, _by_mxfp4, "mxfp4"),
}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def make_pair(case: Case, way: Way, folder: Path) -> tuple[Path, Path]:
    """The model as it is quantised, and a plain one of the numbers that this stands for."""
    from safetensors.numpy import load_file

    made = make_checkpoint(case, folder / "made")
    stored: Tensors = {}
    plain: Tensors = {}
    for name, values in load_file(made / "model.safetensors").items():
        if is_linear(name):
            tensors, numbers = way.quantise(values)
            stored |= in_module(name.removesuffix(".weight"), tensors)
            plain[name] = ("F32", numbers)
        else:
            stored[name] = plain[name] = ("F32", values)
    config = json.loads((made / "config.json").read_text())
    for place, tensors, settings in (("quantised", stored, way.settings), ("plain", plain, None)):
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        write_file(folder / place / "model.safetensors", tensors)
    return folder / "quantised", folder / "plain"
