"""Mixtures of experts in FP8, INT4, AWQ and GPTQ, whose routers are plain: named in a list, or by nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from backends.cpu_cases import PROMPT, cpu, reference
from backends.test_cpu_stored import middle_distance
from families import Case, make_checkpoint
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.check import check_tensors
from monotape.weights.open import open_checkpoint
from weights.expert_files import honest_limit
from weights.quantised_files import Tensors, awq, fp8_blocks, gptq, in_module, packed
from weights.safetensors_files import write_file

CASE = Case(
    "qwen3-moe-fp8", "qwen3_moe",
    {
        "hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 96, "num_experts": 5, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "num_hidden_layers": 2,
    },
)  # fmt: skip
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
#: The sections that tools write, without their lists of modules that stay plain.
SECTIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
}  # fmt: skip
LIST = {"compressed-tensors": "ignore"}  # the others call it modules_to_not_convert
ROUTERS = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
KEPT: dict[str, dict[str, Any]] = {
    "every router": {method: ["lm_head", *ROUTERS] for method in SECTIONS},
    "a pattern": {
        "fp8": ["mlp.gate"], "compressed-tensors": ["lm_head", "re:.*mlp.gate$"], "awq": ["mlp.gate."],
        "gptq": {"-:.*mlp.gate$": {}},
    },
    "nothing": dict.fromkeys(SECTIONS),
}  # fmt: skip


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("method", SECTIONS)
def test_a_plain_router_is_read_whatever_names_it(tmp_path: Path, method: str, kept: str) -> None:
    """Qwen's own GPTQ names no router; its FP8 names each; QuantTrio writes "mlp.gate.", GPTQModel `dynamic`."""
    folder = make_checkpoint(CASE, tmp_path, "float16")
    routers = {
        name: array for name, array in load_file(folder / "model.safetensors").items() if "mlp.gate." in name
    }
    assert {f"{module}.weight" for module in ROUTERS} == routers.keys()
    quantise(folder, method, KEPT[kept][method])
    opened = open_checkpoint(folder)
    check_tensors(spec_from_config(opened.config), opened)
    for name, array in routers.items():
        assert opened.stored_as(name) == "f16"
        np.testing.assert_array_equal(opened.rows(name, 0, 5), array.astype(np.float32))


@pytest.mark.parametrize("method", SECTIONS)
def test_quantised_experts_have_the_numbers_that_are_stored(tmp_path: Path, method: str) -> None:
    """Every matrix but the router's, the embedding and the head."""
    folder = make_checkpoint(CASE, tmp_path, "float16")
    quantise(folder, method, None)
    opened = open_checkpoint(folder)
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    assert opened.stored_as(name) == ("fp8-block" if method == "fp8" else "int4-g32")
    slow = reference(folder)
    want = slow.logits(PROMPT, slow.new_sequence())
    with cpu(folder, "auto") as backend:
        formats = {stage.name: stage.format for stage in backend.plan.ranks[0].stages}
        got = backend.logits(PROMPT, backend.new_sequence())
    expected = {"fp8": Format.Q8, "awq": Format.INT4_G32Z}.get(method, Format.INT4_G32)
    assert (formats["gate_up"], formats["router"]) == (expected, Format.F16)
    # No kernel of a CPU reads fp8, which is rounded to q8.
    assert middle_distance(got, want) <= (0.1 if method == "fp8" else honest_limit(folder, want))


def quantise(folder: Path, method: str, kept: Any) -> None:
    """Rounds the projections of a float16 checkpoint; `kept` is what the config says of modules that stay plain."""
    tensors: Tensors = {}
    for name, array in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= in_module(name.removesuffix(".weight"), rounded(array.astype(np.float32), method))
        else:
            tensors[name] = ("F16", array)
    write_file(folder / "model.safetensors", tensors)
    field = "dynamic" if isinstance(kept, dict) else LIST.get(method, "modules_to_not_convert")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**SECTIONS[method], field: kept}
    (folder / "config.json").write_text(json.dumps(config))


def rounded(matrix: NDArray[np.float32], method: str) -> Tensors:
    """In groups of 32, or in one block of FP8. The zero points of AWQ are the least number of a group."""
    rows, columns = matrix.shape
    if method == "fp8":
        import torch

        scale = np.abs(matrix).max() / 400
        codes = torch.from_numpy(matrix / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return fp8_blocks(codes, np.full((1, 1), scale, np.float32))
    groups = matrix.reshape(rows, -1, 32)
    if method == "awq":
        low, high = groups.min(-1), groups.max(-1)
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales), 0, 15).astype(np.int64)
    else:
        scales = (np.abs(groups).max(-1) / 7).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    integers = np.round(groups / scales[..., None].astype(np.float32)) + zeros[..., None]
    values = np.clip(integers, 0, 15).astype(np.int64).reshape(rows, columns)
    if method == "awq":
        return awq(values, zeros, scales)
    if method == "gptq":
        return gptq(values, zeros, scales, [column // 32 for column in range(columns)])
    return packed(values, None, scales.astype(np.float32))
