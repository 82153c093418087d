"""Writes quantised matrices to the documented layouts, one element at a time, and shares no code with the loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weights.safetensors_files import write_folder

Tensors = dict[str, tuple[str, NDArray[Any]]]
Integers = NDArray[np.int64]
Floats = NDArray[np.float32]

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that each nibble of a word holds, lowest first
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _put(words: NDArray[np.uint32], place: tuple[int, int], value: int, low_bit: int) -> None:
    words[place] |= np.uint32(int(value) << low_bit)


def awq(codes: Integers, zeros: Integers | None, scales: NDArray[np.float16]) -> Tensors:
    """codes [N, K], zeros and scales [N, groups]; N a multiple of 8."""
    rows, columns = codes.shape
    groups = scales.shape[1]
    qweight = np.zeros((columns, rows // 8), np.uint32)
    for n in range(rows):
        for k in range(columns):
            _put(qweight, (k, n // 8), codes[n, k], 4 * AWQ_COLUMNS.index(n % 8))
    found: Tensors = {"qweight": ("I32", qweight), "scales": ("F16", np.ascontiguousarray(scales.T))}
    if zeros is not None:
        qzeros = np.zeros((groups, rows // 8), np.uint32)
        for n in range(rows):
            for g in range(groups):
                _put(qzeros, (g, n // 8), zeros[n, g], 4 * AWQ_COLUMNS.index(n % 8))
        found["qzeros"] = ("I32", qzeros)
    return found


def gptq(
    codes: Integers, zeros: Integers, scales: NDArray[np.float16], group_of: list[int] | None, bits: int = 4,
    version: int = 1,
) -> Tensors:  # fmt: skip
    """codes [N, K], zeros and scales [N, groups]; N and K multiples of 32 / bits."""
    rows, columns = codes.shape
    groups, per_word = scales.shape[1], 32 // bits
    qweight = np.zeros((columns // per_word, rows), np.uint32)
    for n in range(rows):
        for k in range(columns):
            _put(qweight, (k // per_word, n), codes[n, k], bits * (k % per_word))
    qzeros = np.zeros((groups, rows // per_word), np.uint32)
    for n in range(rows):
        for g in range(groups):
            stored = (int(zeros[n, g]) - 1) % (1 << bits) if version == 1 else zeros[n, g]
            _put(qzeros, (g, n // per_word), stored, bits * (n % per_word))
    found: Tensors = {
        "qweight": ("I32", qweight),
        "qzeros": ("I32", qzeros),
        "scales": ("F16", np.ascontiguousarray(scales.T)),
    }
    if group_of is not None:
        found["g_idx"] = ("I32", np.array(group_of, np.int32))
    return found


def packed(
    codes: Integers, zeros: Integers | None, scales: NDArray[np.float32], bits: int = 4,
    group_of: list[int] | None = None,
) -> Tensors:  # fmt: skip
    """pack-quantized of compressed-tensors: codes [N, K] already offset, words along the columns."""
    rows, columns = codes.shape
    per_word = 32 // bits
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for n in range(rows):
        for k in range(columns):
            _put(words, (n, k // per_word), codes[n, k], bits * (k % per_word))
    found: Tensors = {
        "weight_packed": ("I32", words),
        "weight_scale": ("F32", scales),
        "weight_shape": ("I64", np.array([rows, columns], np.int64)),
    }
    if zeros is not None:
        points = np.zeros((-(-rows // per_word), zeros.shape[1]), np.uint32)
        for n in range(rows):
            for g in range(zeros.shape[1]):
                _put(points, (n // per_word, g), zeros[n, g], bits * (n % per_word))
        found["weight_zero_point"] = ("I32", points)
    if group_of is not None:
        found["weight_g_idx"] = ("I32", np.array(group_of, np.int32))
    return found


def fp8_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> Tensors:
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}


def mxfp4(codes: Integers, exponents: NDArray[np.uint8]) -> Tensors:
    """codes [N, K]; byte j of a block of 32 holds elements 2 j, in its low half, and 2 j + 1."""
    rows, columns = codes.shape
    blocks = np.zeros((rows, columns // 32, 16), np.uint8)
    for n in range(rows):
        for k in range(columns):
            blocks[n, k // 32, k % 32 // 2] |= int(codes[n, k]) << (4 * (k % 2))
    return {"weight_blocks": ("U8", blocks), "weight_scales": ("U8", exponents)}


def integers_times_scales(
    codes: Integers, zeros: Integers | None, scales: NDArray[Any], group_of: list[int], middle: int = 8
) -> Floats:
    """(q - z) * s, one element at a time."""
    found = np.empty(codes.shape, np.float32)
    for n in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            g = group_of[k]
            zero = middle if zeros is None else int(zeros[n, g])
            found[n, k] = np.float32(int(codes[n, k]) - zero) * np.float32(scales[n, g])
    return found


def e4m3_numbers(codes: NDArray[np.uint8]) -> Floats:
    """By torch."""
    import torch

    numbers: Floats = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    return numbers


def finite_e4m3(random: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.uint8]:
    codes = random.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    return codes


def in_module(module: str, tensors: Tensors) -> Tensors:
    return {f"{module}.{end}": tensor for end, tensor in tensors.items()}


def quantised_folder(folder: Path, module: str, tensors: Tensors, settings: dict[str, Any]) -> Path:
    """A folder with one quantised module."""
    return write_folder(folder, in_module(module, tensors), quantization_config=settings)
