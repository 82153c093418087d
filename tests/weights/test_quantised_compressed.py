"""compressed-tensors: files that the library itself compresses, against what it decompresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monotape.errors import CheckpointError, ModelError
from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.compressed_matrix import FORMATS
from monotape.weights.quantised.compressed_presets import PRESETS
from monotape.weights.quantised.config import read_method
from monotape.weights.quantised.folder import QuantisedFolder
from weights.quantised_files import (
    E2M1_VALUES,
    Tensors,
    e4m3_numbers,
    finite_e4m3,
    in_module,
    integers_times_scales,
    mxfp4,
    packed,
)
from weights.safetensors_files import write_folder

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 12, "symmetric": True}


def config(weights: dict[str, Any], form: str, **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
        "global_compression_ratio": 1.5, **others,
    }  # fmt: skip


def opened(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> QuantisedFolder:
    found = open_checkpoint(write_folder(folder, in_module(MODULE, tensors), quantization_config=settings))
    assert isinstance(found, QuantisedFolder)
    return found


def compressed(weights: dict[str, Any], form: str, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What the library stores of a weight with its scales, and what it makes of that again."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def write(folder: Path, stored: dict[str, Any], settings: dict[str, Any]) -> QuantisedFolder:
    """By the library of safetensors."""
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "test", "quantization_config": settings}))
    tensors = {f"{MODULE}.{end}": tensor.contiguous() for end, tensor in stored.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors")
    found = open_checkpoint(folder)
    assert isinstance(found, QuantisedFolder)
    return found


def scale_shape(weights: dict[str, Any], rows: int, columns: int) -> tuple[int, ...]:
    match weights["strategy"]:
        case "tensor":
            return (1,)
        case "channel":
            return (rows, 1)
        case "block":
            height, width = weights["block_structure"]
            return (-(-rows // height), -(-columns // width))
    return (rows, columns // int(weights["group_size"]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
def test_packed_integers(tmp_path: Path, dtype: str, symmetric: bool, bits: int, strategy: str) -> None:
    import torch

    torch.manual_seed(bits)
    rows, columns = 13, 36 if strategy == "group" else 37
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = 12
    shape = scale_shape(weights, rows, columns)
    state = {
        "weight": torch.randn(rows, columns).to(getattr(torch, dtype)),
        "weight_scale": (torch.rand(shape) * 0.3 + 0.05).to(getattr(torch, dtype)),
        "weight_zero_point": torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, dtype=torch.int8)
        if not symmetric else torch.zeros(shape, dtype=torch.int8),
    }  # fmt: skip
    stored, expected = compressed(weights, "pack-quantized", state)
    found = write(tmp_path, stored, config(weights, "pack-quantized"))
    assert found.names == {NAME} and found.shape(NAME) == (rows, columns)
    assert found.stored_as(NAME) == f"int{bits}-" + ("g12" if strategy == "group" else strategy)
    # A product of integers and a scale is exact in float32; the library rounds it to the dtype of the scale.
    ours = torch.from_numpy(found.rows(NAME, 0, rows)).to(getattr(torch, dtype))
    assert torch.equal(ours, expected)
    np.testing.assert_array_equal(found.rows(NAME, 5, 9), found.rows(NAME, 0, rows)[5:9])
    matrix = found.stored_matrix(NAME)
    assert matrix is not None and matrix.symmetric == symmetric
    assert matrix.scale_kind == {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    assert len(np.unique(matrix.values(0, rows))) > 8


@pytest.mark.parametrize("form", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block", "group"])
def test_fp8(tmp_path: Path, form: str, strategy: str) -> None:
    import torch

    torch.manual_seed(1)
    rows, columns = 14, 36
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block": {"block_structure": [7, 12]}, "group": {"group_size": 9}}.get(strategy, {})
    shape = scale_shape(weights, rows, columns)
    state = {"weight": torch.randn(rows, columns), "weight_scale": torch.rand(shape) * 0.02 + 0.001}
    stored, expected = compressed(weights, form, state)
    found = write(tmp_path, stored, config(weights, form))
    assert found.stored_as(NAME) == "fp8-" + {"group": "g9"}.get(strategy, strategy)
    np.testing.assert_array_equal(found.rows(NAME, 0, rows), expected.numpy())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_int8_without_packing(tmp_path: Path, symmetric: bool, strategy: str) -> None:
    import torch

    torch.manual_seed(2)
    rows, columns = 11, 19
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
    shape = scale_shape(weights, rows, columns)
    zeros = torch.randint(-90, 90, shape, dtype=torch.int8) if not symmetric else None
    state = {"weight": torch.randn(rows, columns), "weight_scale": torch.rand(shape) * 0.02 + 0.01}
    stored, expected = compressed(weights, "int-quantized", {**state, "weight_zero_point": zeros})
    found = write(tmp_path, stored, config(weights, "int-quantized"))
    np.testing.assert_array_equal(found.rows(NAME, 0, rows), expected.numpy())
    assert found.stored_as(NAME) == f"int8-{strategy}"


def test_nvfp4(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(3)
    rows, columns = 5, 48
    weights: dict[str, Any] = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    state = {
        "weight": torch.randn(rows, columns),
        "weight_scale": (torch.rand(rows, 3) * 100 + 20).to(torch.float8_e4m3fn).to(torch.float32),
        "weight_global_scale": torch.tensor([307.25]),
    }
    stored, expected = compressed({**weights, "scale_dtype": None}, "nvfp4-pack-quantized", state)
    found = write(tmp_path, stored, config(weights, "nvfp4-pack-quantized"))
    matrix = found.stored_matrix(NAME)
    assert matrix is not None and (matrix.label, matrix.scale_kind, matrix.divisor) == (
        "nvfp4",
        "e4m3",
        307.25,
    )
    ours = found.rows(NAME, 0, rows)
    # The library computes in bfloat16: two roundings of 2^-9 each.
    np.testing.assert_allclose(ours, expected.to(torch.float32).numpy(), rtol=2**-7)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes, scales = stored["weight_packed"].numpy(), state["weight_scale"].numpy()
    for n in range(rows):
        for k in range(columns):
            code = int(codes[n, k // 2]) >> (4 * (k % 2)) & 15
            value = np.float32((-1 if code >= 8 else 1) * table[code % 8])
            assert ours[n, k] == value * (scales[n, k // 16] / np.float32(307.25))


def test_mxfp4(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(4)
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    scales = 2.0 ** torch.randint(-6, 2, (3, 2)).to(torch.float32)
    state = {"weight": torch.randn(3, 64), "weight_scale": scales}
    stored, expected = compressed(weights, "mxfp4-pack-quantized", state)
    found = write(tmp_path, stored, config(weights, "mxfp4-pack-quantized"))
    assert found.stored_as(NAME) == "mxfp4"
    np.testing.assert_array_equal(found.rows(NAME, 0, 3), expected.to(torch.float32).numpy())


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([4, 8]), st.integers(1, 19), st.integers(1, 4), st.integers(1, 9), st.booleans(),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_codes_scales_and_zero_points_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, bits: int, rows: int, groups: int, size: int, symmetric: bool,
    seed: int,
) -> None:  # fmt: skip
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (rows, groups * size))
    zeros = None if symmetric else random.integers(0, 1 << bits, (rows, groups))
    scales = random.normal(0, 1, (rows, groups)).astype(np.float32)
    group_of = [int(group) for group in random.permutation(np.arange(groups * size) // size)]
    weights = {**INT4, "num_bits": bits, "group_size": size, "symmetric": symmetric, "actorder": "group"}
    folder = tmp_path_factory.mktemp("packed")
    found = opened(folder, packed(codes, zeros, scales, bits, group_of), config(weights, "pack-quantized"))
    matrix = found.stored_matrix(NAME)
    assert matrix is not None
    start = seed % rows
    np.testing.assert_array_equal(matrix.values(start, rows), codes[start:])
    np.testing.assert_array_equal(matrix.scales(start, rows), scales[start:])
    if zeros is not None:
        np.testing.assert_array_equal(matrix.zeros(start, rows), zeros[start:])
    expected = integers_times_scales(codes, zeros, scales, group_of, 1 << (bits - 1))
    np.testing.assert_array_equal(found.rows(NAME, start, rows), expected[start:])


RANDOM = np.random.default_rng(0)
CODES, SCALES = RANDOM.integers(0, 16, (5, 36)), RANDOM.normal(0, 1, (5, 3)).astype(np.float32)
GOOD = packed(CODES, None, SCALES)
ZEROS = packed(CODES, RANDOM.integers(0, 16, (5, 3)), SCALES)["weight_zero_point"]
ORDER = ("I32", np.array([k % 3 for k in range(36)], np.int32))


def test_old_zero_points_of_one_byte_each(tmp_path: Path) -> None:
    zeros = RANDOM.integers(0, 16, (5, 3))
    tensors = {**GOOD, "weight_zero_point": ("I8", (zeros - 8).astype(np.int8))}
    found = opened(tmp_path, tensors, config({**INT4, "symmetric": False}, "pack-quantized"))
    expected = integers_times_scales(CODES, zeros, SCALES, [k // 12 for k in range(36)])
    np.testing.assert_array_equal(found.rows(NAME, 0, 5), expected)


@pytest.mark.parametrize(
    ("change", "weights", "others", "message"),
    [
        ({"weight_scale": None}, {}, {}, "has no weight_scale, only weight_packed, weight_shape"),
        ({"weight_shape": None}, {}, {}, "has no weight_shape"),
        ({"weight_packed": None}, {}, {}, "has weight_scale, weight_shape, but no quantised matrix"),
        ({"weight_shape": ("I64", np.array([5, 44]))}, {}, {}, "5 x 5, but .* asks for 5 x 6"),
        ({"weight_shape": ("I64", np.array([5, -36]))}, {}, {}, "has 5 rows and -36 columns"),
        ({"weight_scale": ("F32", SCALES[:, :2].copy())}, {}, {}, "5 x 2, but .* asks for 5 x 3"),
        ({"weight_scale": ("F32", np.full((5, 3), np.nan, np.float32))}, {}, {}, "a scale of nan in row 0"),
        ({"weight_zero_point": ZEROS}, {}, {}, "has weight_zero_point, but the config says symmetric = true"),
        ({}, {"symmetric": False}, {}, "has no weight_zero_point"),
        ({"weight_zero_point": ("I8", np.full((5, 3), 8, np.int8))}, {"symmetric": False}, {}, "beyond 4 bits"),
        ({"weight_g_idx": ORDER}, {}, {}, "has weight_g_idx, but the config's actorder"),
        ({}, {"actorder": "group"}, {}, "has no weight_g_idx"),
        ({"weight_g_idx": ("I32", np.zeros(36, np.int32))}, {"actorder": "group"}, {}, "puts 36 columns into group 0"),
        ({"weight_global_scale": ("F32", np.ones(1, np.float32))}, {}, {}, "which its quantisation does not use"),
        ({}, {"actorder": "sideways"}, {}, "actorder is \"sideways\""),
        ({}, {"group_size": 16}, {}, "has 36 columns, which groups of 16 do not divide"),
        ({}, {"num_bits": 3}, {}, "num_bits = 3 and type = int, which is not supported for pack-quantized"),
        ({}, {"type": "float"}, {}, "type = float, which is not supported for pack-quantized"),
        ({}, {"strategy": "token"}, {}, "strategy = \"token\""),
        ({}, {"strategy": "channel"}, {}, "group_size is 12, but the strategy is channel"),
        ({}, {"block_structure": [4, 4]}, {}, "block_structure"),
        ({}, {"dynamic": True}, {}, "dynamic = true"),
        ({}, {"rotation": 1}, {}, "rotation = 1, a field that compressed-tensors does not know"),
        ({}, {}, {"format": "marlin-24"}, "format = \"marlin-24\", which is not supported"),
        ({}, {}, {"quantization_status": "calibration"}, "its weights were never compressed"),
        ({}, {}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
        ({}, {"is_mx": True}, {}, "is_mx = true, which is not supported for pack-quantized"),
        ({}, {"block_structure": "4x4"}, {}, "block_structure is \"4x4\", but must be two numbers with the strategy"),
        ({}, {"strategy": "block", "group_size": None, "block_structure": "4x"}, {}, "must be two numbers, rows and"),
        ({}, {"strategy": "block", "group_size": None, "block_structure": "4x0"}, {}, "must be two numbers, rows and"),
        ({}, {}, {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
        ({}, {}, {"config_groups": {"group_0": "W4A16"}}, "must be an object, or the list of targets of a preset"),
        ({}, {}, {"config_groups": {"group_0": ["Linear"]}}, "group_0 is no preset that is supported"),
        ({}, {}, {"config_groups": {"W3A16": ["Linear"]}}, "W3A16 is no preset that is supported"),
        ({}, {}, {"config_groups": {"W4A16": []}}, "config_groups.W4A16 is .*, but must list modules"),
        ({}, {}, {"config_groups": {"W4A16": [4]}}, "must be a list of strings"),
        ({}, {}, {"config_groups": {"FP8": ["Linear"]}}, "FP8.weights.num_bits = 8 and type = float, which is not"),
        ({}, {}, {"config_groups": {"W4A16": ["Linear"]}}, "has 36 columns, which groups of 128 do not divide"),
        ({}, {}, {"config_groups": {"UNQUANTIZED": ["Linear"]}}, "leaves .*down_proj as it is"),
        ({}, {}, {"config_groups": {"a": {"targets": ["Linear"], "scheme": "W4A16"}}}, "scheme = \"W4A16\", a field"),
        ({}, {}, {"ignore": ["Linear"]}, "leaves .*down_proj as it is"),
        ({}, {}, {"ignore": [MODULE]}, "leaves .*down_proj as it is, but it is stored quantised"),
        ({}, {}, {"ignore": ["re:.*down_proj"]}, "leaves .*down_proj as it is, but it is stored quantised"),
        ({}, {}, {"ignore": ["re:*down"]}, "is no regular expression"),
        ({}, {}, {"config_groups": {}}, "must name a group at least"),
        ({}, {}, {"config_groups": {"a": {"targets": ["re:.*q"], "weights": INT4}}}, "leaves .*down_proj as it is"),
        ({}, {}, {"secret": 1}, "secret = 1, a field that compressed-tensors does not know"),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, change: dict[str, Any], weights: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    tensors = {end: tensor for end, tensor in {**GOOD, **change}.items() if tensor is not None}
    described = config({**INT4, **weights}, "pack-quantized", **others)
    with pytest.raises((CheckpointError, ModelError), match=message) as refused:
        opened(tmp_path, tensors, described).rows(NAME, 0, 5)
    assert refused.value.hint and refused.value.message.count(". ") == 0


def test_ignored_names_are_whole_and_patterns_match_from_the_start(tmp_path: Path) -> None:
    tensors = in_module(MODULE, GOOD)
    plain = ("model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.o_proj.weight")
    tensors |= {name: ("F32", np.ones((3, 4), np.float32)) for name in plain}
    described = config(INT4, "pack-quantized", ignore=["model.layers.1.mlp.down_proj", "re:.*self_attn.*"])
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=described))
    assert found.names == {NAME, *plain}
    described = config(INT4, "pack-quantized", ignore=["down_proj", "re:self_attn"])
    with pytest.raises(CheckpointError, match=r"says that .* is quantised, but it is stored as f32"):
        _ = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=described)).names


@pytest.mark.parametrize("parent", ["model.layers.0.mlp", "model.layers.0"])
def test_an_ignored_parent_leaves_the_question_to_the_tensors(tmp_path: Path, parent: str) -> None:
    """The library matches whole names, so that a parent's ignores nothing below it; vLLM leaves experts plain by it."""
    other = "model.layers.0.mlp.up_proj"
    described = config(INT4, "pack-quantized", ignore=[parent])
    tensors = in_module(MODULE, GOOD) | {f"{other}.weight": ("F32", np.ones((3, 4), np.float32))}
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=described))
    assert (found.stored_as(NAME), found.stored_as(f"{other}.weight")) == ("int4-g12", "f32")
    outside = "model.layers.01.mlp.o_proj"  # no parent of it is named, though the names begin alike
    tensors[f"{outside}.weight"] = ("F32", np.ones((3, 4), np.float32))
    with pytest.raises(CheckpointError, match=f"says that {outside} is quantised, but it is stored as f32"):
        _ = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=described)).names


def test_the_rules_for_ignored_modules_are_the_library_s() -> None:
    """A fused name aside, whose parts vLLM looks up, and the class of all matrices."""
    import torch
    from compressed_tensors.utils.match import is_match

    names = [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.10.mlp.down_proj",
        "lm_head",
    ]
    entries = [
        "lm_head", "model.layers.0.mlp.down_proj", "down_proj", "model.layers.0", "model.layers.0.mlp", "Linear",
        "Embedding", "re:.*mlp", "re:mlp", "re:model.layers.0", "re:.*down_proj$", "re:.*_pro$", "re:lm",
    ]  # fmt: skip
    for entry in entries:
        described = {**config(INT4, "pack-quantized", ignore=[entry])}
        method = read_method({"quantization_config": described})
        for name in names:
            theirs = is_match(name, torch.nn.Linear(1, 1), entry)
            ours = method.quantises(name)
            assert ours is (not theirs) or (ours is None and not theirs and name.startswith(f"{entry}.")), (
                name,
                entry,
            )


def test_the_presets_are_the_library_s() -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    readable = {kind for kinds in FORMATS.values() for kind in kinds}
    for name, theirs in PRESET_SCHEMES.items():
        weights = theirs.get("weights")
        if weights is not None and (
            (weights.type, weights.num_bits) not in readable or name.startswith("MXFP8")
        ):
            assert name not in PRESETS
            continue
        ours = PRESETS[name]
        assert ours.activations is ("input_activations" in theirs)
        if weights is None:
            assert ours.weights is None
            continue
        assert ours.weights is not None
        spelt = QuantizationArgs(**ours.weights)
        said = (
            "num_bits",
            "type",
            "symmetric",
            "strategy",
            "group_size",
            "block_structure",
            "dynamic",
            "actorder",
        )
        assert [getattr(spelt, field) for field in said] == [getattr(weights, field) for field in said], name
    assert PRESETS.keys() <= PRESET_SCHEMES.keys()


@pytest.mark.parametrize(
    ("preset", "form"),
    [
        ("W4A16", "pack-quantized"), ("w4a16", "pack-quantized"), ("W4A16_ASYM", "pack-quantized"),
        ("W8A16", "pack-quantized"), ("W8A8", "int-quantized"), ("FP8", "float-quantized"),
        ("FP8_DYNAMIC", "float-quantized"), ("FP8_BLOCK", "float-quantized"), ("MXFP4", "mxfp4-pack-quantized"),
    ],
)  # fmt: skip
def test_a_preset_is_read_as_the_group_that_the_library_makes_of_it(
    tmp_path: Path, preset: str, form: str
) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationConfig

    torch.manual_seed(5)
    rows, columns = 130, 256
    short = {"format": form, "config_groups": {preset: ["Linear"]}, "quantization_status": "compressed"}
    spelt_out = QuantizationConfig(**short).model_dump(mode="json")
    weights = spelt_out["config_groups"][preset]["weights"]
    weights = {name: weights[name] for name in weights if name not in ("scale_dtype", "zp_dtype")}
    shape = scale_shape(weights, rows, columns)
    zeros = (
        torch.zeros(shape, dtype=torch.int8)
        if weights["symmetric"]
        else torch.randint(-8, 8, shape, dtype=torch.int8)
    )
    scales = torch.rand(shape) * 0.02 + 0.01
    state = {
        "weight": torch.randn(rows, columns) * 0.1,
        "weight_scale": 2.0 ** torch.floor(torch.log2(scales)) if preset == "MXFP4" else scales,
    }
    if form != "float-quantized" and preset != "MXFP4":
        state["weight_zero_point"] = zeros
    stored, expected = compressed(weights, form, state)
    if weights["symmetric"]:
        stored.pop("weight_zero_point", None)
    found = write(tmp_path / "short", stored, {**config({}, form), "config_groups": short["config_groups"]})
    long = write(tmp_path / "long", stored, {**config({}, form), "config_groups": spelt_out["config_groups"]})
    np.testing.assert_array_equal(found.rows(NAME, 0, rows), expected.to(torch.float32).numpy())
    assert found.stored_as(NAME) == long.stored_as(NAME) and found.config == long.config
    np.testing.assert_array_equal(found.rows(NAME, 0, rows), long.rows(NAME, 0, rows))


def test_fields_that_say_nothing_of_the_numbers(tmp_path: Path) -> None:
    """What the library writes of what it did not do, and AutoRound of itself; null is as good as absent."""
    weights = {
        **INT4, "is_mx": False, "block_structure": None, "actorder": None, "dynamic": False, "observer": "minmax",
        "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": "torch.int8",
    }  # fmt: skip
    for transforms in (None, {}, {"config_groups": {}}):
        described = config(
            weights, "pack-quantized", transform_config=transforms, sparsity_config={}, version="0.13.0",
            provider="auto-round", moe_sparsity_config=None,
        )  # fmt: skip
        found = opened(tmp_path, GOOD, described)
        assert found.stored_as(NAME) == "int4-g12"
        expected = integers_times_scales(CODES, None, SCALES, [k // 12 for k in range(36)])
        np.testing.assert_array_equal(found.rows(NAME, 0, 5), expected)


def test_weights_without_a_width_have_eight_bits(tmp_path: Path) -> None:
    """The library's default, and its readers'."""
    codes, scales = RANDOM.integers(0, 256, (6, 9)), RANDOM.normal(0, 1, (6, 1)).astype(np.float32)
    found = opened(
        tmp_path, packed(codes, None, scales, 8), config({"strategy": "channel"}, "pack-quantized")
    )
    np.testing.assert_array_equal(
        found.rows(NAME, 0, 6), integers_times_scales(codes, None, scales, [0] * 9, 128)
    )


def test_blocks_in_the_words_of_early_files(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "3x2"}
    codes = finite_e4m3(np.random.default_rng(7), (5, 4))
    scales = RANDOM.uniform(0.1, 1, (2, 2)).astype(np.float32)
    tensors: Tensors = {"weight": ("F8_E4M3", codes), "weight_scale": ("F32", scales)}
    found = opened(tmp_path, tensors, config(weights, "float-quantized"))
    expected = e4m3_numbers(codes) * scales[np.arange(5)[:, None] // 3, np.arange(4)[None, :] // 2]
    np.testing.assert_array_equal(found.rows(NAME, 0, 5), expected)


def test_mxfp4_may_say_so_twice(tmp_path: Path) -> None:
    """Drafts of the format had `is_mx`; where the format is MXFP4 the two agree."""
    codes = RANDOM.integers(0, 16, (3, 64))
    blocks = mxfp4(codes, np.full((3, 2), 125, np.uint8))
    tensors: Tensors = {
        "weight_packed": ("U8", blocks["weight_blocks"][1].reshape(3, 32)),
        "weight_scale": blocks["weight_scales"],
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "is_mx": True}
    found = opened(tmp_path, tensors, config(weights, "mxfp4-pack-quantized"))
    signs = np.where(codes < 8, 1, -1)
    expected = signs * np.array(E2M1_VALUES)[codes % 8] / 4
    np.testing.assert_array_equal(found.rows(NAME, 0, 3), expected.astype(np.float32))


def test_a_group_that_names_a_module_comes_before_one_that_names_its_class(tmp_path: Path) -> None:
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
    codes, scales = RANDOM.integers(0, 256, (6, 9)), RANDOM.normal(0, 1, (6, 1)).astype(np.float32)
    other = "model.layers.0.self_attn.o_proj"
    tensors = in_module(MODULE, GOOD) | in_module(other, packed(codes, None, scales, 8))
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4},
        "group_1": {"targets": ["re:.*o_proj"], "weights": int8},
    }
    described = config({}, "pack-quantized", config_groups=groups)
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=described))
    assert (found.stored_as(NAME), found.stored_as(f"{other}.weight")) == ("int4-g12", "int8-channel")
    groups["group_2"] = {"targets": ["Linear"], "weights": int8}
    described = config({}, "pack-quantized", config_groups=groups)
    with pytest.raises(CheckpointError, match=r"Two config_groups .* claim .*down_proj, and differ"):
        _ = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=described)).names


def test_groups_of_several_formats(tmp_path: Path) -> None:
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    other = "model.layers.0.self_attn.o_proj"
    tensors = in_module(MODULE, GOOD)
    tensors[f"{other}.weight"] = ("F8_E4M3", np.full((4, 5), 0x38, np.uint8))
    tensors[f"{other}.weight_scale"] = ("F32", np.full((4, 1), 0.5, np.float32))
    groups = {
        "group_0": {"targets": ["re:.*mlp.*"], "weights": INT4, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*attn.*"], "weights": fp8, "format": "float-quantized"},
    }
    described = config({}, "mixed-precision", config_groups=groups)
    found = open_checkpoint(write_folder(tmp_path, tensors, quantization_config=described))
    assert (found.stored_as(NAME), found.stored_as(f"{other}.weight")) == ("int4-g12", "fp8-channel")
    np.testing.assert_array_equal(found.rows(f"{other}.weight", 0, 4), np.full((4, 5), 0.5))


def test_quantised_activations_are_noted_and_their_scales_checked(tmp_path: Path) -> None:
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    tensors: Tensors = {
        "weight": ("F8_E4M3", np.full((4, 5), 0x38, np.uint8)),
        "weight_scale": ("BF16", np.array([0x3F80], np.uint16)),
        "input_scale": ("F32", np.float32([0.25])),
    }
    described = config(fp8, "float-quantized")
    described["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8,
        "type": "float",
        "dynamic": False,
    }
    found = opened(tmp_path, tensors, described)
    assert found.names == {NAME}
    assert any("activations keep 16 bits" in note for note in found.config["_monotape_notes_quantised"])
    tensors["input_scale"] = ("F32", np.float32([0]))
    with pytest.raises(CheckpointError, match=r"input_scale holds 0\.0"):
        _ = opened(tmp_path, tensors, described).names


def test_the_early_name_of_the_section(tmp_path: Path) -> None:
    tensors = in_module(MODULE, GOOD)
    described = config(INT4, "pack-quantized")
    found = open_checkpoint(write_folder(tmp_path, tensors, compression_config=described))
    assert found.stored_as(NAME) == "int4-g12" and "compression_config" not in found.config
    with pytest.raises(ModelError, match="say the same thing"):
        open_checkpoint(
            write_folder(tmp_path, tensors, compression_config=described, quantization_config=described)
        )
