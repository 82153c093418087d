"""The loaders beside other people's readers of the same files: compressed-tensors' converters, and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.folder import QuantisedFolder
from weights.quantised_files import Tensors, awq, finite_e4m3, fp8_blocks, mxfp4, packed, quantised_folder

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
RANDOM = np.random.default_rng(0)


def _torch(tensors: Tensors) -> dict[str, Any]:
    import torch

    def convert(dtype: str, values: Any) -> Any:
        if dtype == "I32":
            return torch.from_numpy(values.view(np.int32).copy())
        tensor = torch.from_numpy(values.copy())
        return tensor.view(torch.float8_e4m3fn) if dtype == "F8_E4M3" else tensor

    return {f"{MODULE}.{end}": convert(*tensor) for end, tensor in tensors.items()}


def _opened(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> QuantisedFolder:
    found = open_checkpoint(quantised_folder(folder, MODULE, tensors, settings))
    assert isinstance(found, QuantisedFolder)
    return found


@pytest.mark.parametrize("zero_point", [True, False])
def test_awq_as_the_converter_of_compressed_tensors_reads_it(tmp_path: Path, zero_point: bool) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    rows, columns, size = 24, 36, 12
    codes, zeros = RANDOM.integers(0, 16, (rows, columns)), RANDOM.integers(0, 16, (rows, 3))
    scales = RANDOM.normal(0, 0.1, (rows, 3)).astype(np.float16)
    tensors = awq(codes, zeros if zero_point else None, scales)
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": zero_point}
    found = _opened(tmp_path, tensors, settings).stored_matrix(NAME)
    assert found is not None
    theirs = AutoAWQConverter(4, size, zero_point).process(_torch(tensors))
    values = unpack_from_int32(theirs[f"{MODULE}.weight_packed"], 4, (rows, columns))
    np.testing.assert_array_equal(found.values(0, rows), values.numpy() + 8)
    np.testing.assert_array_equal(found.scales(0, rows), theirs[f"{MODULE}.weight_scale"].numpy())
    if zero_point:
        points = unpack_from_int32(theirs[f"{MODULE}.weight_zero_point"], 4, (rows, 3), packed_dim=0)
        np.testing.assert_array_equal(found.zeros(0, rows), points.numpy() + 8)


def test_block_fp8_as_the_converter_of_compressed_tensors_reads_it(tmp_path: Path) -> None:
    import torch
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    rows, columns = 139, 261
    scales = RANDOM.uniform(0, 0.1, (2, 3)).astype(np.float32)
    tensors = fp8_blocks(finite_e4m3(RANDOM, (rows, columns)), scales)
    found = _opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    converter = FP8BlockDequantizer(weight_block_size=(128, 128), dtype=torch.float32)
    np.testing.assert_array_equal(found.rows(NAME, 0, rows), converter.process(_torch(tensors))[NAME].numpy())


def test_mxfp4_as_transformers_reads_it(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = mxfp4(RANDOM.integers(0, 16, (7, 96)), RANDOM.integers(90, 140, (7, 3)).astype(np.uint8))
    found = _opened(tmp_path, tensors, {"quant_method": "mxfp4"})
    blocks, scales = (torch.from_numpy(tensors[end][1].copy()) for end in ("weight_blocks", "weight_scales"))
    # transformers takes experts, and turns their matrices round.
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    np.testing.assert_array_equal(found.rows(NAME, 0, 7), theirs.numpy())


@pytest.mark.parametrize(("scale", "exact"), [(0x3C00, True), (0x0100, False)])
def test_bf16_scales_that_f16_holds_keep_integers_exact_in_8_bits(
    tmp_path: Path, scale: int, exact: bool
) -> None:
    """One scale that f16 does not hold is enough to round the whole matrix, also for rows that do not have it."""
    codes = RANDOM.integers(0, 16, (5, 64))
    words = np.full((5, 2), 0x3D12, np.uint16)
    words[4, 1] = scale
    tensors = packed(codes, None, np.zeros((5, 2), np.float32)) | {"weight_scale": ("BF16", words)}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found = _opened(tmp_path, tensors, settings)
    rows = found.integer_rows(NAME, 0, 2)
    assert (rows is not None) is exact
    if rows is not None:
        product = rows[0] * np.repeat(rows[1].astype(np.float32), 32, axis=1)
        np.testing.assert_array_equal(product, found.rows(NAME, 0, 2))
