"""models/registry.py and the family files: real configs, what each field means, what is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monotape.errors import ModelError, MonotapeError, UnsupportedModel
from monotape.models.registry import FAMILIES, spec_from_config
from monotape.models.spec import LAYER_ROLES, MODEL_ROLES, ModelSpec
from real_configs import CONFIGS, PARAMETERS

LLAMA = "meta-llama/Llama-3.2-1B"
MISTRAL = "mistralai/Mistral-7B-v0.3"
QWEN2 = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
QWEN3 = "Qwen/Qwen3-0.6B"
PHI3 = "microsoft/Phi-4-mini-instruct"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M"


def spec_of(name: str, **changes: Any) -> ModelSpec:
    """The spec of a real config with some fields changed; `...` takes a field out."""
    config = copy.deepcopy(CONFIGS[name]) | changes
    return spec_from_config({field: value for field, value in config.items() if value is not ...})


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configs_have_their_published_parameters(name: str) -> None:
    spec = spec_of(name)
    assert spec.parameters == PARAMETERS[name]
    assert set(spec.layer_tensors) <= set(LAYER_ROLES)
    assert set(spec.model_tensors) == set(MODEL_ROLES) - ({"head"} if spec.tied else set())
    assert spec.dtype == "bfloat16"


def test_llama_with_everything_said() -> None:
    spec = spec_of(LLAMA)
    assert (spec.family, spec.layers, spec.width, spec.heads, spec.kv_heads) == ("llama", 16, 2048, 32, 8)
    assert (spec.head_dim, spec.ffn, spec.vocab, spec.context) == (64, 8192, 128256, 131072)
    assert (spec.norm_eps, spec.tied, spec.qkv_bias, spec.qk_norm) == (1e-5, True, False, False)
    assert (spec.bos_ids, spec.eos_ids) == ((128000,), (128001,))
    assert spec.windows == (None,) * 16
    assert spec.rope.rule == "llama3 x32 of 8192, theta 500000"
    assert spec_of(LLAMA, eos_token_id=[128001, 128008]).eos_ids == (128001, 128008)


def test_defaults_are_those_of_transformers() -> None:
    bare = dict.fromkeys(
        (
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "tie_word_embeddings",
            "rope_scaling",
            "rope_theta",
        ),
        ...,
    )
    llama = spec_of(LLAMA, **bare, torch_dtype=...)
    assert (llama.kv_heads, llama.head_dim, llama.norm_eps, llama.tied) == (32, 64, 1e-6, False)
    assert (llama.rope.rule, llama.dtype) == ("theta 10000", "float32")
    mistral = spec_of(MISTRAL, **bare, sliding_window=...)
    assert (mistral.kv_heads, mistral.windows[0]) == (8, 4096)
    assert spec_of(QWEN3, **bare, num_attention_heads=32).head_dim == 128
    phi3 = spec_of(PHI3, **bare, sliding_window=..., partial_rotary_factor=...)
    assert (phi3.kv_heads, phi3.norm_eps, phi3.windows[0], phi3.rope.dims) == (24, 1e-5, None, 128)


def test_phi3_finds_its_projections_in_fused_tensors() -> None:
    spec = spec_of(PHI3)
    q, kv, ffn = 24 * 128, 8 * 128, 8192
    rows = {role: spec.layer_tensors[role].rows for role in ("q", "k", "v", "gate", "up", "down")}
    assert rows == {
        "q": (0, q),
        "k": (q, q + kv),
        "v": (q + kv, q + 2 * kv),
        "gate": (0, ffn),
        "up": (ffn, 2 * ffn),
        "down": None,
    }
    assert spec.layer_tensors["v"].in_layer(7) == "model.layers.7.self_attn.qkv_proj.weight"
    assert (spec.rope.dims, spec.rope.short_context) == (96, 4096)


def test_qwen_families_have_what_sets_them_apart() -> None:
    qwen2, qwen3 = spec_of(QWEN2), spec_of(QWEN3)
    assert qwen2.qkv_bias
    assert qwen2.layer_tensors["k_bias"].in_layer(0) == "model.layers.0.self_attn.k_proj.bias"
    assert qwen3.qk_norm
    assert qwen3.layer_tensors["q_norm"].in_layer(3) == "model.layers.3.self_attn.q_norm.weight"
    assert (qwen3.head_dim, qwen3.q_rows, qwen3.width) == (128, 2048, 1024)


@pytest.mark.parametrize("name", [QWEN2, QWEN3])
def test_qwen_windows(name: str) -> None:
    layers = CONFIGS[name]["num_hidden_layers"]
    on = {"use_sliding_window": True, "sliding_window": 512}
    assert spec_of(name, sliding_window=512, max_window_layers=3).windows == (None,) * layers
    mixed = spec_of(name, **on, max_window_layers=3).windows
    assert mixed == (None,) * 3 + (512,) * (layers - 3)
    assert spec_of(name, **on, max_window_layers=layers + 40).windows == (None,) * layers
    kinds = ["sliding_attention", *["full_attention"] * (layers - 1)]
    assert spec_of(name, **on, layer_types=kinds).windows == (512,) + (None,) * (layers - 1)


def test_a_window_as_wide_as_the_context_is_none() -> None:
    assert set(spec_of(MISTRAL, sliding_window=32767).windows) == {32767}
    assert set(spec_of(MISTRAL, sliding_window=32768).windows) == {None}


def test_model_type_alone_is_enough() -> None:
    assert spec_of(QWEN3, architectures=...) == spec_of(QWEN3)
    assert spec_of(QWEN3, architectures=[]) == spec_of(QWEN3)


def test_notes_reach_the_spec() -> None:
    assert spec_of(SMOLLM2, _monotape_notes=["the head is Q8_0"]).notes == ("the head is Q8_0",)


@pytest.mark.parametrize(
    ("architecture", "near"),
    [
        ("Ministral3ForCausalLM", "MistralForCausalLM"),
        ("Qwen3NextForCausalLM", "Qwen3ForCausalLM"),
        ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
        ("Phi4ForCausalLM", "Phi3ForCausalLM"),
        ("Llama4ForConditionalGeneration", "LlamaForCausalLM"),
        ("Gemma3ForCausalLM", "ForCausalLM"),
        ("DeepseekV3ForCausalLM", "ForCausalLM"),
    ],
)
def test_other_architectures_are_refused_with_the_nearest(architecture: str, near: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_of(LLAMA, architectures=[architecture])
    assert architecture in caught.value.message
    assert near in caught.value.message.split("nearest")[1]
    assert all(name in caught.value.hint for name in FAMILIES)


def test_an_unknown_model_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnsupportedModel, match="qwen3_vl is not supported; the nearest that is: qwen3"):
        spec_of(QWEN3, architectures=..., model_type="qwen3_vl")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # values of known fields that would change the result
    (LLAMA, {"attention_bias": True}, "attention_bias = true"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias = true"),
    (LLAMA, {"hidden_act": "gelu"}, 'hidden_act = "gelu".*"silu"'),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp = 2"),
    (LLAMA, {"is_causal": False}, "is_causal = false"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*gptq"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096"),
    (LLAMA, {"layer_types": ["chunked_attention"] * 16}, "chunked_attention"),
    (SMOLLM2, {"rope_interleaved": True}, "rope_interleaved = true"),
    (MISTRAL, {"attention_bias": True}, "attention_bias = true"),
    (QWEN2, {"use_mrope": True}, "use_mrope = true"),
    (QWEN2, {"attention_bias": False}, "attention_bias = false"),
    (QWEN3, {"attention_bias": True}, "attention_bias = true"),
    (PHI3, {"full_attn_mod": 2}, "full_attn_mod = 2"),
    (PHI3, {"lm_head_bias": True}, "lm_head_bias = true"),
    (PHI3, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "the rope rule yarn"),
    # unknown fields
    (LLAMA, {"num_experts": 8}, "num_experts = 8"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
    (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_config"),
    (QWEN3, {"hiden_act": "silu"}, "hiden_act.*nearest known field is hidden_act"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(name, **changes)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (LLAMA, {"hidden_size": ...}, "no field hidden_size"),
    (LLAMA, {"hidden_size": -2048}, "hidden_size is -2048"),
    (LLAMA, {"hidden_size": "2048"}, 'hidden_size is "2048"'),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads is 0"),
    (LLAMA, {"num_attention_heads": True}, "num_attention_heads is true"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    (LLAMA, {"vocab_size": 2**63}, "vocab_size is 9223372036854775808"),
    (
        LLAMA,
        {"num_key_value_heads": 5},
        r"num_key_value_heads is 5, but must divide num_attention_heads \(32\)",
    ),
    (LLAMA, {"head_dim": None, "hidden_size": 2047}, r"must divide hidden_size \(2047\)"),
    (LLAMA, {"head_dim": 63}, "rotate in pairs"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    (LLAMA, {"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes"'),
    (LLAMA, {"eos_token_id": 128256}, "eos_token_id is 128256"),
    (LLAMA, {"bos_token_id": True}, "bos_token_id is true"),
    (LLAMA, {"pad_token_id": 128256}, "pad_token_id is 128256"),
    (LLAMA, {"dtype": "float32"}, 'dtype is "float32", but torch_dtype is bfloat16'),
    (LLAMA, {"model_type": "mistral"}, 'model_type is "mistral"'),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures is"),
    (LLAMA, {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "architectures is"),
    (LLAMA, {"architectures": ..., "model_type": ...}, "names no architecture"),
    (LLAMA, {"rope_scaling": None, "rope_parameters": {"rope_theta": 7.0}}, "rope_theta is 7.0"),
    (QWEN2, {"layer_types": ["full_attention"] * 23}, "layer_types lists 23 layers, but there are 24"),
    (QWEN2, {"layer_types": ["sliding_attention"] * 24}, "no sliding window is switched on"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window is 0"),
    (MISTRAL, {"sliding_window": 9, "layer_types": ["full_attention"] * 32}, "every layer sliding_attention"),
    (PHI3, {"original_max_position_embeddings": ...}, "original_max_position_embeddings is missing"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_what_makes_no_sense_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(name, **changes)


@pytest.mark.parametrize("config", [[], "llama", None, 3])
def test_a_config_must_be_an_object(config: Any) -> None:
    with pytest.raises(ModelError, match="must hold an object"):
        spec_from_config(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_config_gives_a_spec_or_one_clear_error(data: st.DataObject) -> None:
    config = copy.deepcopy(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[field] = data.draw(JSON)
    if isinstance(config.get("rope_scaling"), dict) and config["rope_scaling"]:
        inner = data.draw(st.sampled_from(sorted(config["rope_scaling"])))
        config["rope_scaling"][inner] = data.draw(JSON)
    try:
        spec = spec_from_config(config)
    except MonotapeError:
        return
    assert len(spec.windows) == spec.layers
    assert len(spec.rope.frequencies) == spec.rope.dims // 2
