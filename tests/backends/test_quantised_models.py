"""Small models quantised in every way: they generate what a plain checkpoint of the dequantised weights does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import PROMPT, cpu, generate, ids, reference
from families import BY_NAME, Case, make_checkpoint
from monotape.engine.loading import choose_format, gpu_formats, plan_for
from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.plan.types import Format
from monotape.weights.check import check_tensors
from monotape.weights.open import open_checkpoint
from monotape.weights.tapes import load_tapes
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


def _by_awq(matrix: Floats) -> tuple[Tensors, Floats]:
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
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _by_awq, "int4-g32"
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


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def make_pair(case: Case, way: Way, folder: Path) -> tuple[Path, Path]:
    """The model as it is quantised, and a plain one of the numbers that this stands for."""
    from safetensors.numpy import load_file

    made = make_checkpoint(case, folder / "made")
    stored: Tensors = {}
    plain: Tensors = {}
    for name, values in load_file(made / "model.safetensors").items():
        if _is_linear(name):
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def folders(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = make_pair(WAYS[name].case, WAYS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folders


Pair = Callable[[str], tuple[Path, Path]]


@pytest.mark.parametrize("name", WAYS)
def test_the_reference_computes_what_the_format_says(pair: Pair, name: str) -> None:
    quantised, plain = pair(name)
    opened = open_checkpoint(quantised)
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    labels = {opened.stored_as(tensor) for tensor in opened.names if _is_linear(tensor)}
    assert labels == {WAYS[name].label}
    ours, theirs = reference(quantised), reference(plain)
    logits = ours.logits(PROMPT, ours.new_sequence())
    np.testing.assert_array_equal(logits, theirs.logits(PROMPT, theirs.new_sequence()))
    assert ids(generate(ours)) == ids(generate(theirs))


@pytest.mark.parametrize("name", WAYS)
def test_the_cores_run_it(pair: Pair, name: str) -> None:
    quantised, plain = pair(name)
    with cpu(quantised, "f32") as ours, cpu(plain, "f32") as theirs:
        assert ids(generate(ours)) == ids(generate(theirs))
    with cpu(quantised, "auto") as ours:
        assert ours.plan.format is Format.Q8
        assert len(generate(ours, count=7)) == 7


class _Recording:
    """A packer that only looks at what it is given."""

    def __init__(self) -> None:
        self.floats, self.integers = 0, 0

    def pack(self, fmt: Format, rows: Floats, out: NDArray[np.uint8]) -> int:
        self.floats += rows.size
        return -1

    def pack_integers(self, integers: NDArray[np.int8], scales: NDArray[np.float16], out: Any) -> int:
        assert scales.shape == (integers.shape[0], integers.shape[1] // 32)
        self.integers += integers.size
        return -1


@pytest.mark.parametrize(("name", "exact"), [("awq", True), ("gptq", True), ("gptq-v2-sorted", False)])
def test_integers_in_groups_of_32_reach_the_8_bit_format_unrounded(
    pair: Pair, name: str, exact: bool
) -> None:
    opened = open_checkpoint(pair(name)[0])
    spec = spec_from_config(opened.config)
    plan = plan_for(spec, opened, dtype="auto", context=160, workers=1)
    packer = _Recording()
    load_tapes(spec, plan, opened, packer)
    matrices = sum(int(np.prod(opened.shape(tensor))) for tensor in opened.names if _is_linear(tensor))
    assert packer.integers == (matrices if exact else 0)
    assert packer.floats >= (0 if exact else matrices)


def test_formats_of_a_backend(pair: Pair) -> None:
    opened = open_checkpoint(pair("awq")[0])
    spec = spec_from_config(opened.config)
    assert choose_format("auto", spec, opened) is Format.Q8
    assert gpu_formats("auto", spec, opened) == (Format.BF16, {})


def test_a_quantised_head_is_used_where_the_config_ties_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    case = Case("tied", "llama", {**EVEN.fields, "tie_word_embeddings": True, "vocab_size": 136})
    quantised, plain = make_pair(case, WAYS["awq"], tmp_path)
    made = load_file(quantised / "model.safetensors")
    head = np.random.default_rng(0).normal(0, 0.2, (136, 64)).astype(np.float32)
    tensors, numbers = _by_awq(head)
    dtypes = {"int32": "I32", "uint32": "I32", "float16": "F16", "float32": "F32"}
    stored = {name: (dtypes[str(values.dtype)], values) for name, values in made.items()}
    write_file(quantised / "model.safetensors", stored | in_module("lm_head", tensors))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = []
    (quantised / "config.json").write_text(json.dumps(config))
    values = load_file(plain / "model.safetensors")
    write_file(
        plain / "model.safetensors",
        {name: ("F32", value) for name, value in {**values, "lm_head.weight": numbers}.items()},
    )
    ours, theirs = reference(quantised), reference(plain)
    assert not ours.spec.tied and any("ties the head" in note for note in ours.spec.notes)
    assert ids(generate(ours)) == ids(generate(theirs))


def test_biases_of_zeros_are_passed_over_and_others_are_not(pair: Pair, tmp_path: Path) -> None:
    """GPTQ's first tools wrote one for every matrix."""
    from safetensors.numpy import load_file

    quantised = pair("gptq")[0]
    made = load_file(quantised / "model.safetensors")
    made["model.layers.0.mlp.down_proj.bias"] = np.zeros(64, np.float16)
    dtypes = {"int32": "I32", "uint32": "I32", "float16": "F16", "float32": "F32"}
    (tmp_path / "config.json").write_text((quantised / "config.json").read_text())
    for value in (0.0, 0.5):
        made["model.layers.0.mlp.down_proj.bias"][3] = value
        write_file(
            tmp_path / "model.safetensors",
            {name: (dtypes[str(values.dtype)], values) for name, values in made.items()},
        )
        opened = open_checkpoint(tmp_path)
        spec = spec_from_config(opened.config)
        if value == 0.0:
            check_tensors(spec, opened)
        else:
            with pytest.raises(
                CheckpointError, match=r"does not use: model\.layers\.0\.mlp\.down_proj\.bias"
            ):
                check_tensors(spec, opened)
