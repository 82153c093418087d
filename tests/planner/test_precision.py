"""Bytes of weights: formats of the user's choice, and what checkpoints say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.quantised_cases import EVEN, WAYS, make_pair
from families import Case
from monotape.engine.asked import Asked, formats_for
from monotape.engine.formats import gpu_formats
from monotape.errors import ModelError, UnsupportedModel, UsageError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.planner.accounting import shape_from_config
from monotape.planner.load import Load
from monotape.planner.precision import FORMATS, kv_bytes_for, precision_for
from monotape.planner.runs import obstacles
from monotape.planner.shape import ATTENTION, FFN, HEAD, ROUTED, ROUTER, SHARED, Part
from monotape.weights.json_file import read_object
from monotape.weights.open import open_checkpoint
from planner.loads import box_of, config_of, load_of


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gpt-oss-20b", 12.8 * 1.073741824),  # checkpoint sizes of the model card, in GiB
        ("gpt-oss-120b", 60.8 * 1.073741824),
        ("kimi-k2.5", 594),  # the size of the published files
        ("kimi-k3", 1560),
        ("deepseek-v4-flash", 156),
        ("llama-3.1-8b", 16.06),
    ],
)
def test_weights_take_the_space_that_the_published_files_take(name: str, gigabytes: float) -> None:
    assert load_of(name).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 16), ("q8", 8.5), ("int4", 4.5), ("mxfp4", 4.25)])
def test_one_format_for_every_matrix_a_token_reads(dtype: str, bits: float) -> None:
    load = load_of("llama-3.2-1b", dtype)
    matrices = sum(times * part.matrices for part, times in load.shape.all_parts())
    vectors = sum(times * part.vectors for part, times in load.shape.all_parts())
    assert load.weight_bytes == matrices * bits / 8 + vectors * 2


def test_a_head_of_another_format() -> None:
    load = load_of("llama-3.1-8b")
    alike = precision_for("int4-g128", {})
    wide = precision_for("int4-g128", {}, "bf16")
    assert alike.matrices[HEAD] == alike.matrices[FFN] == wide.matrices[FFN] == 66 / 128
    assert wide.matrices[HEAD] == 2.0 and wide.note.endswith("; the head as bf16")
    (head,) = (part for part, _ in load.shape.all_parts() if part.kind == HEAD)
    assert wide.read_bytes(head) - alike.read_bytes(head) == head.matrices * (2 - 66 / 128)
    assert precision_for("bf16", {}, "q8").matrices[HEAD] == 34 / 32


def compressed(**weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def preset(name: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {name: ["Linear"]}, "ignore": ["lm_head"]}


def test_fp8_has_a_scale_for_each_block() -> None:
    assert FORMATS["fp8"][0] == 1 + 4 / 16384


def test_routers_embeddings_and_vectors_are_never_shrunk() -> None:
    precision = precision_for("int4", {})
    assert precision.read_bytes(Part(ROUTER, 100, 7)) == 214
    assert precision.read_bytes(Part(ROUTED, 100, 7, copies=9, chosen=2)) == 2 * (56.25 + 14)
    assert precision.stored_bytes(Part(ROUTED, 100, 7, copies=9, chosen=2)) == 9 * (56.25 + 14)


def kinds_shrunk(config: dict[str, Any]) -> set[str]:
    return set(precision_for("auto", config).matrices)


def test_checkpoints_say_what_they_leave_alone() -> None:
    assert kinds_shrunk(config_of("gpt-oss-20b")) == {ROUTED, SHARED, FFN}
    assert kinds_shrunk(config_of("kimi-k2.5")) == {ROUTED}
    assert kinds_shrunk(config_of("kimi-k3")) == {ROUTED}
    assert kinds_shrunk(config_of("deepseek-v3")) == {ATTENTION, FFN, SHARED, ROUTED}
    assert kinds_shrunk(config_of("minimax-m2.7")) == {ATTENTION, FFN, SHARED, ROUTED}  # "gate" is the router
    assert kinds_shrunk(config_of("qwen3-8b")) == set()


def test_mxfp4_without_a_list_is_sure_of_the_routed_experts_alone() -> None:
    """As the loader has it; with a list, everything else is quantised."""
    for quantized in ({"quant_method": "mxfp4"}, {"quant_method": "mxfp4", "modules_to_not_convert": None}):
        assert kinds_shrunk(config_of("gpt-oss-20b", quantization_config=quantized)) == {ROUTED}
    complete = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    assert kinds_shrunk(config_of("gpt-oss-20b", quantization_config=complete)) == {
        ATTENTION, FFN, SHARED, ROUTED, HEAD,
    }  # fmt: skip


def test_the_preset_that_quantises_nothing_means_plain_weights() -> None:
    config = config_of("qwen3-8b", quantization_config=preset("unquantized"))
    assert precision_for("auto", config) == precision_for("auto", config_of("qwen3-8b"))


def test_deepseek_v4_has_fp4_experts_in_an_fp8_model() -> None:
    precision = precision_for("auto", config_of("deepseek-v4-flash"))
    assert precision.matrices[ROUTED] == 0.53125
    assert precision.matrices[ATTENTION] == FORMATS["fp8"][0]
    assert HEAD not in precision.matrices


@pytest.mark.parametrize(
    ("quantized", "size"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 0.5 + 2.5 / 64),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            1.0,
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, 1 + 3 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, 1.5),
        ({"quant_method": "awq", "bits": 4}, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "w_bit": 4, "group_size": None, "zero_point": False}, 0.5 + 2 / 128),
        (compressed(type="int", num_bits=4, group_size=128, symmetric=False), 0.5 + 2.5 / 128),
        (compressed(type="int", num_bits=4, group_size=128, symmetric=True), 0.5 + 2 / 128),
        (compressed(num_bits=4, strategy="channel", group_size=None), 0.5),
        (compressed(num_bits=8, strategy="channel", symmetric=True), 1.0),
        (compressed(type="int", num_bits=8, group_size=32, symmetric=True), 1 + 2 / 32),
        (compressed(type="int", num_bits=8, strategy="channel", symmetric=False), 1.5),
        (compressed(type="float", num_bits=4, strategy="tensor_group", group_size=16), 1.5),
        (compressed(type="float", num_bits=4, group_size=32), 0.5 + 1 / 32),
        ({"method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        (preset("W4A16"), 0.5 + 2 / 128),
        (preset("w4a16_asym"), 0.5 + 2.5 / 128),
        (preset("FP8_DYNAMIC"), 1.0),
        (preset("MXFP4A16"), 0.5 + 1 / 32),
    ],
)
def test_common_quantisations_are_understood(quantized: dict[str, Any], size: float) -> None:
    precision = precision_for("auto", config_of("qwen3-8b", quantization_config=quantized))
    assert precision.matrices[FFN] == size
    assert HEAD not in precision.matrices


SORTED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}


@pytest.mark.parametrize(
    "quantized",
    [
        SORTED,
        {**SORTED, "sym": False, "static_groups": False},
        compressed(type="int", num_bits=4, group_size=128, symmetric=False, actorder="group"),
    ],
)
def test_sorted_columns_are_unpacked_but_those_of_down(quantized: dict[str, Any]) -> None:
    """No format of codes holds them, so a GPU's tapes hold 16 bits; `down` alone can be put in order."""
    precision = precision_for("auto", config_of("qwen3-8b", quantization_config=quantized))
    assert precision.matrices[ATTENTION] == 2.0
    assert precision.matrices[FFN] == pytest.approx((2 + 2 + 0.5 + 2.5 / 128) / 3)
    assert "(all matrices but down); bf16 in head" in precision.note
    of_experts = config_of("qwen3-30b-a3b", quantization_config=quantized)
    assert precision_for("auto", of_experts).matrices[ROUTED] == 2.0


@pytest.mark.parametrize(
    "quantized",
    [
        {**SORTED, "static_groups": True},
        compressed(type="int", num_bits=4, group_size=128, symmetric=False, actorder="weight"),
    ],
)
def test_columns_whose_groups_are_in_order_stay_codes(quantized: dict[str, Any]) -> None:
    precision = precision_for("auto", config_of("qwen3-8b", quantization_config=quantized))
    assert precision.matrices[ATTENTION] == precision.matrices[FFN] == 0.5 + 2.5 / 128
    whole = precision_for("auto", config_of("qwen3-8b", quantization_config={**SORTED, "group_size": -1}))
    assert whole.matrices[ATTENTION] == 0.5


@pytest.mark.parametrize(("family", "down"), [("llama", Format.INT4_G32Z), ("phi3", Format.BF16)])
def test_sorted_columns_are_counted_as_they_are_loaded(tmp_path: Path, family: str, down: Format) -> None:
    """Where gate and up are one tensor, the loader cannot put the columns of down in order."""
    folder = make_pair(Case("sorted", family, EVEN.fields), WAYS["gptq-v2-sorted"], tmp_path)[0]
    opened = open_checkpoint(folder)
    _, chosen = formats_for("cuda", Asked(), spec_from_config(opened.config), opened)
    found = {
        name: chosen.of_stages.get(name, chosen.default) for name in ("qkv", "output", "gate_up", "down")
    }
    assert found == {"qkv": Format.BF16, "output": Format.BF16, "gate_up": Format.BF16, "down": down}
    precision = precision_for("auto", read_object(folder / "config.json"))
    assert precision.matrices[ATTENTION] == 2.0
    assert (precision.matrices[FFN] == 2.0) == (down is Format.BF16)


def test_nvfp4_is_called_that_and_runs() -> None:
    """No smaller format of the tapes holds it than `wide`: its 12 bits are what a token reads."""
    nvfp4 = compressed(type="float", num_bits=4, strategy="tensor_group", group_size=16)
    config = config_of("qwen3-8b", quantization_config=nvfp4)
    precision = precision_for("auto", config)
    assert precision.note == "as the checkpoint says: nvfp4 as wide; bf16 in head"
    load = Load(shape_from_config(config), precision, kv_bytes_for("bf16"))
    assert not obstacles(load, box_of("h200")) and not obstacles(load, box_of("cpu", bandwidth_tbs=0.1))


@pytest.mark.parametrize("name", sorted(WAYS))
def test_the_planner_reads_what_the_loaders_read(name: str, tmp_path: Path) -> None:
    """Also which weights take 12 bits: those that the loader gives the format `wide` on a GPU."""
    folder = make_pair(WAYS[name].case, WAYS[name], tmp_path)[0]
    opened = open_checkpoint(folder)
    chosen = gpu_formats(spec_from_config(opened.config), opened)
    precision = precision_for("auto", read_object(folder / "config.json"))
    assert (precision.matrices[FFN] == 1.5) == (chosen.of_stages.get("down") is Format.WIDE)
    assert precision.matrices[FFN] < 1.1 or " as wide" in precision.name or "sorted columns" in precision.name


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_both_names_of_the_list_of_plain_modules_are_read(field: str) -> None:
    quantized = {"quant_method": "fp8", field: ["lm_head", "model.layers.1.self_attn"]}
    assert kinds_shrunk(config_of("qwen3-8b", quantization_config=quantized)) == {FFN, SHARED, ROUTED}
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    assert HEAD in kinds_shrunk(config_of("qwen3-8b", quantization_config=quantized))


@pytest.mark.parametrize(
    "quantized",
    [
        {"quant_method": "mystery"},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "awq", "bits": 4, "group_size": "all"},
        compressed(type="int", num_bits=4, group_size=0),
        preset("W5A16"),
        compressed(type="float", num_bits=4),
        {"quant_method": "gptq", "bits": 5, "group_size": 128},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}},
        },
    ],
)
def test_a_quantisation_that_is_not_understood_is_refused_with_a_way_out(quantized: dict[str, Any]) -> None:
    config = config_of("qwen3-8b", quantization_config=quantized)
    with pytest.raises(UnsupportedModel, match="--dtype"):
        precision_for("auto", config)
    assert precision_for("fp8", config).name == "fp8"


def test_odd_values_are_refused() -> None:
    with pytest.raises(ModelError, match="must be an object"):
        precision_for("auto", {"quantization_config": [1]})
    with pytest.raises(UnsupportedModel, match="int7"):
        precision_for("auto", {"torch_dtype": "int7"})
    with pytest.raises(UnsupportedModel, match="fp3"):
        precision_for("auto", config_of("deepseek-v4-flash", expert_dtype="fp3"))
    with pytest.raises(UsageError, match="nearest it knows is 'mxfp4'"):
        precision_for("mxpf4", {})
