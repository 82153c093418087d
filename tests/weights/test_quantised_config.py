"""Which quantised checkpoints are read at all: methods by name, lists of modules, matrices that belong together."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monotape.errors import CheckpointError, ModelError, UnsupportedModel
from monotape.weights.formats import is_readable
from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.config import READERS
from monotape.weights.quantised.folder import QuantisedFolder
from monotape.weights.quantised.names import listed
from weights.quantised_files import (
    Tensors,
    awq,
    finite_e4m3,
    fp8_blocks,
    gptq,
    in_module,
    mxfp4,
    packed,
    quantised_folder,
)  # fmt: skip
from weights.safetensors_files import write_folder

LAYER = "model.layers.0."
RANDOM = np.random.default_rng(0)
MATRIX = awq(
    RANDOM.integers(0, 16, (8, 12)),
    RANDOM.integers(0, 16, (8, 2)),
    RANDOM.normal(0, 1, (8, 2)).astype(np.float16),
)
PLAIN = ("F16", np.ones((8, 12), np.float16))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 6}


def names_of(folder: Path, tensors: Tensors, settings: Any) -> frozenset[str]:
    return open_checkpoint(write_folder(folder, tensors, quantization_config=settings)).names


@pytest.mark.parametrize(
    ("settings", "name", "instead"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "dequantize"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes", "dequantize"),
        ({"quant_method": "hqq"}, "hqq", "GPTQ"),
        ({"quant_method": "aqlm"}, "aqlm", "GPTQ"),
        ({"quant_method": "quanto"}, "quanto", "GPTQ"),
        ({"quant_method": "torchao"}, "torchao", "Python objects"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", "compressed-tensors"),
        ({"quant_method": "modelopt"}, "modelopt", "llm-compressor"),
        ({"quant_method": "gguf"}, "gguf", "GGUF file itself"),
        ({"quant_method": "AWQ"}, "AWQ", "GPTQ"),
        ({"method": "qqq", "bits": 4}, "qqq", "GPTQ"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path: Path, settings: Any, name: str, instead: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"quantised with {name}, which") as refused:
        open_checkpoint(quantised_folder(tmp_path, "model.norm", {"weight": PLAIN}, settings))
    assert instead in refused.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 4}, "names no quant_method"),
        ([1], "must be an object"),
        ({"quant_method": 8}, "must be a string"),
        ({"quant_method": "awq", "method": 8}, "must be a string"),
        ({"quant_method": "awq", "method": "gptq"}, 'method is "gptq", but quant_method is awq'),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(quantised_folder(tmp_path, "model.norm", {"weight": PLAIN}, settings))


@pytest.mark.parametrize(
    ("end", "hint"),
    [
        ("down_proj.qweight", "copy it into config.json"),
        ("down_proj.weight_packed", "fetch it again"),
        ("down_proj.weight_scale", "hf_quant_config.json, they are modelopt's"),
        ("down_proj.weight_scale_inv", "fetch it again"),
        ("experts.down_proj_blocks", "fetch it again"),
        ("experts.down_proj_scales", "fetch it again"),
    ],
)
def test_quantised_weights_without_a_config_are_refused(tmp_path: Path, end: str, hint: str) -> None:
    """Only GPTQ and AWQ ever kept it in a file of its own that can be copied."""
    name = f"{LAYER}mlp.{end}"
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config") as refused:
        open_checkpoint(write_folder(tmp_path, {name: ("U8", np.zeros((2, 2), np.uint8))}))
    assert name in refused.value.message and hint in refused.value.hint
    assert ("quantize_config.json" in refused.value.hint) == (end == "down_proj.qweight")


@pytest.mark.parametrize("end", ["weight.absmax", "SCB"])
def test_bitsandbytes_without_a_config_is_refused_by_name(tmp_path: Path, end: str) -> None:
    tensors: Tensors = {f"{LAYER}mlp.down_proj.{end}": ("F32", np.ones(2, np.float32))}
    with pytest.raises(UnsupportedModel, match="quantised with bitsandbytes, which") as refused:
        open_checkpoint(write_folder(tmp_path, tensors))
    assert "dequantize" in refused.value.hint


#: What its exports to AWQ and GPTQ say beside the fields of the format.
AUTOROUND = {
    "provider": "auto-round",
    "autoround_version": "0.4.3", "data_type": "int", "iters": 200, "lr": 0.005, "minmax_lr": 0.005, "nsamples": 128,
    "seqlen": 2048, "batch_size": 8, "amp": True, "low_gpu_mem_usage": True, "enable_quanted_input": True,
    "enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "gradient_accumulate_steps": 1,
    "to_quant_block_names": None, "scale_dtype": "torch.float16", "act_bits": 16, "act_group_size": 32, "act_sym": True,
    "act_dynamic": True, "act_data_type": "int", "super_bits": None, "super_group_size": None, "damp_percent": 0.01,
    "true_sequential": False, "block_name_to_quantize": "model.layers",
}  # fmt: skip


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_exports_that_replace_auto_round_are_read(tmp_path: Path, method: str) -> None:
    tensors, settings = STORED[method]
    module = f"{LAYER}mlp.down_proj"
    both = in_module(module, tensors)
    assert names_of(tmp_path, both, {**settings, **AUTOROUND}) == {f"{module}.weight"}
    for name, value in (
        ("data_type", "mx_fp"),
        ("act_bits", 8),
        ("super_bits", 6),
        ("rotation_config", {"a": 1}),
    ):
        with pytest.raises(UnsupportedModel, match=f"quantization_config.{name} = "):
            names_of(tmp_path, both, {**settings, **AUTOROUND, name: value})
    with pytest.raises(UnsupportedModel, match="quantised with auto-round, which") as refused:
        names_of(tmp_path, both, {"quant_method": "auto-round", "bits": 4})
    assert "auto_gptq and auto_awq" in refused.value.hint


#: What says how a file was made, wherever a version of a tool has put it.
MADE = {
    "meta": {"quantizer": ["gptqmodel:5.6.12"], "uri": "https://github.com/modelcloud/gptqmodel", "mse": 0.0},
    "quantizer": "optimum:1.24", "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
    "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0, "act_group_aware": True,
    "gptaq": False, "gptaq_alpha": 0.25, "pack_impl": "cpu", "offload_to_disk": True, "offload_to_disk_path": "./a/",
    "tokenizer": None, "dataset": "c4", "model_seqlen": 2048, "batch_size": 1, "exllama_config": {"version": 1},
    "lm_head": False, "pack_dtype": "int32", "sym": True,
}  # fmt: skip


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_how_a_file_was_made_does_not_matter(tmp_path: Path, method: str) -> None:
    tensors, settings = STORED[method]
    module = f"{LAYER}mlp.down_proj"
    both = in_module(module, tensors)
    assert names_of(tmp_path, both, {**settings, **MADE, "method": method}) == {f"{module}.weight"}
    without = {name: value for name, value in settings.items() if name != "quant_method"}
    assert names_of(tmp_path, both, {**without, "method": method}) == {f"{module}.weight"}


def test_a_plain_folder_stays_one(tmp_path: Path) -> None:
    opened = open_checkpoint(write_folder(tmp_path, {"model.norm.weight": PLAIN}, quantization_config=None))
    assert not isinstance(opened, QuantisedFolder)


@pytest.mark.parametrize(
    ("quantised", "plain"),
    [
        ("self_attn.q_proj", "self_attn.k_proj"),
        ("mlp.up_proj", "mlp.gate_proj"),
        ("self_attn.v_proj", "self_attn.q_proj"),
    ],
)
def test_matrices_that_are_multiplied_together_are_quantised_together(
    tmp_path: Path, quantised: str, plain: str
) -> None:
    tensors = in_module(LAYER + quantised, MATRIX) | {f"{LAYER}{plain}.weight": PLAIN}
    with pytest.raises(CheckpointError, match=r"is quantised and .* is not, but both are one matrix"):
        names_of(tmp_path, tensors, {**AWQ, "modules_to_not_convert": [plain]})


def test_other_matrices_of_a_layer_may_differ(tmp_path: Path) -> None:
    tensors = in_module(f"{LAYER}self_attn.o_proj", MATRIX) | {f"{LAYER}mlp.down_proj.weight": PLAIN}
    names = names_of(tmp_path, tensors, {**AWQ, "modules_to_not_convert": ["mlp"]})
    assert names == {f"{LAYER}self_attn.o_proj.weight", f"{LAYER}mlp.down_proj.weight"}


@pytest.mark.parametrize("module", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_a_fused_matrix_is_quantised_as_a_whole(tmp_path: Path, module: str) -> None:
    parts = {
        "self_attn.qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "mlp.gate_up_proj": ["gate_proj", "up_proj"],
    }
    tensors = in_module(LAYER + module, MATRIX)
    assert names_of(tmp_path, tensors, AWQ) == {f"{LAYER}{module}.weight"}
    with pytest.raises(CheckpointError, match=r"which is only a part of model\.layers\.0"):
        names_of(tmp_path, tensors, {**AWQ, "modules_to_not_convert": parts[module][:1]})
    with pytest.raises(CheckpointError, match="as it is, but it is stored quantised"):
        names_of(tmp_path, tensors, {**AWQ, "modules_to_not_convert": parts[module]})
    plain: Tensors = {f"{LAYER}{module}.weight": PLAIN}
    assert names_of(tmp_path, plain, {**AWQ, "modules_to_not_convert": parts[module]}) == set(plain)


def test_the_head_is_quantised_where_a_flag_says_so(tmp_path: Path) -> None:
    tensors = in_module("lm_head", MATRIX)
    with pytest.raises(CheckpointError, match="leaves lm_head as it is, but it is stored quantised"):
        names_of(tmp_path, tensors, AWQ)
    assert names_of(tmp_path, tensors, {**AWQ, "lm_head": True}) == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.1.mlp.down_proj", True), ("model.layers.1", True), ("down_proj", True), ("mlp.down_proj", True),
        ("model.layers.*.mlp", True), ("re:.*mlp", True), ("re:mlp", False), ("model.layers.11", False),
        ("down", False), ("proj", False), ("lm_head", False), ("re:.*down$", False),
        ("mlp.down_proj.", True), ("model.layers.1.", True), ("down.", False), ("model.layers.11.", False), ("", False),
        (".", False),
    ],
)  # fmt: skip
def test_patterns_of_lists(pattern: str, expected: bool) -> None:
    assert listed("model.layers.1.mlp.down_proj", [pattern]) is expected


CODES = RANDOM.integers(0, 16, (8, 64))
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
STORED: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "fp8": (
        fp8_blocks(finite_e4m3(RANDOM, (9, 13)), np.ones((1, 1), np.float32)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "compressed-tensors": (
        packed(CODES, None, np.ones((8, 2), np.float32)),
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUPS}},
        },
    ),
    "awq": (MATRIX, AWQ),
    "gptq": (
        gptq(CODES, np.full((8, 2), 8), np.ones((8, 2), np.float16), None),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    ),
    # With a list, though an empty one: without one the tensors of all but experts may be plain.
    "mxfp4": (
        mxfp4(CODES, np.full((8, 2), 127, np.uint8)),
        {"quant_method": "mxfp4", "modules_to_not_convert": []},
    ),
}  # fmt: skip


def test_every_method_has_a_file_here() -> None:
    assert STORED.keys() == READERS.keys()


@pytest.mark.parametrize("method", STORED)
def test_a_truncated_file_is_refused(tmp_path: Path, method: str) -> None:
    tensors, settings = STORED[method]
    folder = quantised_folder(tmp_path, f"{LAYER}mlp.down_proj", tensors, settings)
    rows = open_checkpoint(folder).shape(f"{LAYER}mlp.down_proj.weight")[0]
    open_checkpoint(folder).rows(f"{LAYER}mlp.down_proj.weight", 0, rows)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"lies at bytes .* but the file has") as refused:
        open_checkpoint(folder)
    assert refused.value.hint and refused.value.message.count(". ") == 0


@pytest.mark.parametrize("method", STORED)
@pytest.mark.parametrize("router", ["mlp.gate", "mlp.router", "block_sparse_moe.gate"])
def test_a_router_may_be_plain_though_no_list_names_it(tmp_path: Path, method: str, router: str) -> None:
    """Many writers leave routers alone without a word; other matrices are still held to the list."""
    tensors, settings = STORED[method]
    module = f"{LAYER}mlp.experts.3.down_proj"
    names = names_of(
        tmp_path,
        in_module(module, tensors) | {f"{LAYER}{router}.weight": PLAIN, "lm_head.weight": PLAIN},
        settings,
    )
    assert names == {f"{module}.weight", f"{LAYER}{router}.weight", "lm_head.weight"}
    other = f"{LAYER}mlp.router_proj"
    with pytest.raises(CheckpointError, match=f"says that {other} is quantised, but it is stored as f16"):
        names_of(tmp_path, in_module(module, tensors) | {f"{other}.weight": PLAIN}, settings)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_dynamic_may_skip_modules_and_nothing_else(tmp_path: Path, method: str) -> None:
    tensors, settings = STORED[method]
    module, plain = f"{LAYER}mlp.down_proj", f"{LAYER}self_attn.o_proj"
    both = in_module(module, tensors) | {f"{plain}.weight": PLAIN}
    for dynamic in (
        {"-:.*self_attn.*": {}},
        {r"-:model\.layers\.0\.self_attn\.o_proj$": {}, "-:.*mlp.gate$": None},
    ):
        assert names_of(tmp_path, both, {**settings, "dynamic": dynamic}) == {
            f"{plain}.weight",
            f"{module}.weight",
        }
    with pytest.raises(CheckpointError, match=r"says that .*o_proj is quantised, but it is stored as f16"):
        names_of(
            tmp_path, both, {**settings, "dynamic": {"-:o_proj": {}}}
        )  # an expression for the start of a name
    with pytest.raises(CheckpointError, match=r"leaves .*down_proj as it is, but it is stored quantised"):
        names_of(tmp_path, both, {**settings, "dynamic": {"-:.*": {}}})
    with pytest.raises(ModelError, match=r"no regular expression"):
        names_of(tmp_path, both, {**settings, "dynamic": {"-:.*[": {}}})
    for pattern in ("+:.*down_proj", ".*down_proj", "-:.*down_proj"):
        with pytest.raises(
            UnsupportedModel, match=r"dynamic\..*down_proj = {\"bits\": 8}, which gives some"
        ) as refused:
            names_of(tmp_path, both, {**settings, "dynamic": {"-:.*self_attn.*": {}, pattern: {"bits": 8}}})
        assert refused.value.hint and refused.value.message.count(". ") == 0


@pytest.mark.parametrize(("method", "claimed"), list(permutations(STORED, 2)))
def test_a_file_of_another_method_than_its_config_names_is_refused(
    tmp_path: Path, method: str, claimed: str
) -> None:
    module = f"{LAYER}mlp.down_proj"
    folder = quantised_folder(tmp_path, module, STORED[method][0], STORED[claimed][1])
    with pytest.raises((CheckpointError, ModelError)) as refused:
        open_checkpoint(folder).rows(f"{module}.weight", 0, 8)
    assert module in refused.value.message
    assert refused.value.hint and refused.value.message.count(". ") == 0


def test_everything_that_a_matrix_is_made_of_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monotape.weights.safetensors_folder import SafetensorsFolder

    module = f"{LAYER}mlp.down_proj"
    opened = open_checkpoint(quantised_folder(tmp_path, module, MATRIX, AWQ))
    released: list[str] = []
    monkeypatch.setattr(SafetensorsFolder, "release", lambda self, name: released.append(name))
    before = opened.rows(f"{module}.weight", 0, 8)
    opened.release(f"{module}.weight")
    assert sorted(released) == [f"{module}.{end}" for end in ("qweight", "qzeros", "scales")]
    np.testing.assert_array_equal(opened.rows(f"{module}.weight", 0, 8), before)
    with pytest.raises(CheckpointError, match="has no tensor ghost"):
        opened.shape("ghost")


@pytest.mark.parametrize(
    "label", ["fp8-block", "fp8-g64", "int4-g128", "int8-channel", "int4-tensor", "mxfp4", "nvfp4"]
)
def test_labels_that_are_readable(label: str) -> None:
    assert is_readable(label) and not is_readable(f"{label}x")
