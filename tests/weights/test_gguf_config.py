"""weights/gguf_config.py: the config that a GGUF file amounts to, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from monotape.errors import CheckpointError, UnsupportedModel
from monotape.models.registry import spec_from_config
from monotape.weights.check import check_tensors
from monotape.weights.gguf_file import GgufFile
from weights.gguf_files import (
    FFN,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    model_values,
    write_gguf,
    write_model,
)


def _config(
    tmp_path: Path, architecture: str = "llama", values: Any = None, **metadata: Any
) -> dict[str, Any]:
    """The config of a small model; `metadata` is below the architecture's prefix, with "__" for a dot."""
    entries = {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    opened = GgufFile(write_model(tmp_path / "m.gguf", architecture, values, metadata=entries))
    return dict(opened.config)


def test_a_llama_config_is_that_of_the_hub(tmp_path: Path) -> None:
    assert _config(tmp_path) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 200,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"), ("phi3", "Phi3ForCausalLM")],
)
def test_other_families_are_named(tmp_path: Path, architecture: str, name: str) -> None:
    config = _config(tmp_path, architecture)
    assert config["architectures"] == [name]
    assert config.get("head_dim") == (HEAD_DIM if architecture == "qwen3" else None)
    assert spec_from_config(config).head_dim == HEAD_DIM


def test_a_sliding_window_makes_it_a_mistral(tmp_path: Path) -> None:
    config = _config(tmp_path, attention__sliding_window=9)
    assert config["architectures"] == ["MistralForCausalLM"]
    assert spec_from_config(config).windows == (9,) * LAYERS


def test_a_window_of_zero_is_none(tmp_path: Path) -> None:
    assert _config(tmp_path, "phi3", attention__sliding_window=0)["sliding_window"] is None
    assert _config(tmp_path, "phi3", attention__sliding_window=11)["sliding_window"] == 11


def test_heads_that_do_not_add_up_to_the_width(tmp_path: Path) -> None:
    values = model_values("qwen3")
    rng = np.random.default_rng(1)
    for layer in range(LAYERS):
        for part, shape in (
            ("attn_q", (HEADS * 10, WIDTH)), ("attn_k", (KV_HEADS * 10, WIDTH)),
            ("attn_v", (KV_HEADS * 10, WIDTH)), ("attn_output", (WIDTH, HEADS * 10)),
            ("attn_q_norm", (10,)), ("attn_k_norm", (10,)),
        ):  # fmt: skip
            values[f"blk.{layer}.{part}.weight"] = rng.standard_normal(shape).astype(np.float32)
    entries = {
        f"qwen3.{key}": 10
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    }
    opened = GgufFile(write_model(tmp_path / "m.gguf", "qwen3", values, metadata=entries))
    spec = spec_from_config(opened.config)
    assert spec.head_dim == 10
    check_tensors(spec, opened)


def test_no_kv_heads_means_as_many_as_heads(tmp_path: Path) -> None:
    values = model_values("qwen3")
    config = _config(tmp_path, "qwen3", values, attention__head_count_kv=None)
    assert config["num_key_value_heads"] == HEADS


def test_llama3_frequency_factors_are_passed_on(tmp_path: Path) -> None:
    factors = np.linspace(1, 32, HEAD_DIM // 2).astype(np.float32)
    values = model_values("llama") | {"rope_freqs.weight": factors}
    opened = GgufFile(write_model(tmp_path / "m.gguf", "llama", values))
    scaling = opened.config["rope_scaling"]
    assert scaling["rope_type"] == "factors"
    assert np.array_equal(np.array(scaling["factors"], np.float32), factors)
    assert "rope_freqs.weight" not in opened.names
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    plain = 50000.0 ** -(np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    np.testing.assert_allclose(spec.rope.frequencies, plain / factors, rtol=1e-6)


def test_phi3_longrope(tmp_path: Path) -> None:
    short, long = (np.linspace(1, top, 6).astype(np.float32) for top in (1.25, 4.5))
    values = model_values("phi3") | {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    entries = {
        "phi3.rope.dimension_count": 12,
        "phi3.rope.scaling.original_context_length": 64,
        "phi3.rope.scaling.attn_factor": 1.19,
    }
    opened = GgufFile(write_model(tmp_path / "m.gguf", "phi3", values, metadata=entries))
    scaling = opened.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert np.array_equal(np.array(scaling["short_factor"], np.float32), short)
    assert np.array_equal(np.array(scaling["long_factor"], np.float32), long)
    assert scaling["original_max_position_embeddings"] == 64
    assert scaling["attention_factor"] == 1.19
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    assert (spec.rope.dims, spec.rope.short_context, spec.rope.magnitude) == (12, 64, 1.19)


def test_linear_scaling_old_and_new(tmp_path: Path) -> None:
    expected = {"rope_type": "linear", "factor": 2.5}
    new = _config(tmp_path, rope__scaling__type="linear", rope__scaling__factor=2.5)
    assert new["rope_scaling"] == expected
    assert _config(tmp_path, rope__scale_linear=2.5)["rope_scaling"] == expected
    assert _config(tmp_path, rope__scaling__type="none")["rope_scaling"] is None


def test_yarn_is_passed_on(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=50,
    )
    assert config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50
    }  # fmt: skip


def test_a_yarn_setting_that_hugging_face_does_not_have_is_refused(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=50,
        rope__scaling__yarn_ext_factor=0.5,
    )
    with pytest.raises(UnsupportedModel, match="yarn_ext_factor"):
        spec_from_config(config)


def test_an_unknown_scaling_is_refused_by_name(tmp_path: Path) -> None:
    config = _config(tmp_path, rope__scaling__type="spiral")
    with pytest.raises(UnsupportedModel, match="spiral"):
        spec_from_config(config)


def test_partial_rotation_is_passed_on(tmp_path: Path) -> None:
    assert spec_from_config(_config(tmp_path, "phi3", rope__dimension_count=12)).rope.dims == 12
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        spec_from_config(_config(tmp_path, "qwen2", rope__dimension_count=12))


def test_unknown_architectures_and_mixtures_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "g.gguf", "gemma3", {}, {"x": (Kind.F32, np.ones(3, np.float32))})
    opened = GgufFile(path)
    assert opened.names == {"x"}
    with pytest.raises(UnsupportedModel, match="gemma3"):
        spec_from_config(opened.config)
    with pytest.raises(CheckpointError, match=r"has no llama\.expert_used_count"):
        _config(tmp_path, expert_count=8)
    with pytest.raises(UnsupportedModel, match="qwen3 with experts"):
        spec_from_config(_config(tmp_path, "qwen3", expert_count=8))
    assert _config(tmp_path, expert_count=0)["architectures"] == ["LlamaForCausalLM"]


def test_the_stored_precision_of_plain_files(tmp_path: Path) -> None:
    for kind, name in ((Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.Q8_0, None)):
        opened = GgufFile(write_model(tmp_path / "m.gguf", kinds={"token_embd.weight": kind}))
        assert opened.config.get("torch_dtype") == name


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"attention__scale": 0.5}, UnsupportedModel, r"llama\.attention\.scale"),
        ({"logit_scale": 0.5}, UnsupportedModel, r"llama\.logit_scale"),
        ({"attention__value_length": 8}, UnsupportedModel, "values of another size"),
        ({"block_count": None}, CheckpointError, r"has no llama\.block_count"),
        ({"attention__layer_norm_rms_epsilon": None}, CheckpointError, "has no llama.*epsilon"),
        ({"block_count": 0}, CheckpointError, "block_count is 0"),
        ({"block_count": 4_000_000_000}, CheckpointError, "block_count is 4000000000"),
        (
            {"block_count": 2_000_000_000},
            CheckpointError,
            "tensors for 3 layers, but its metadata says 2000000000",
        ),
        ({"embedding_length": 97}, CheckpointError, "token_embd.weight has shape .* width 97"),
        ({"vocab_size": 36}, CheckpointError, "token_embd.weight has shape .* says 36 tokens"),
        ({"attention__head_count": 5}, CheckpointError, "attn_q.weight has shape .* 5 heads"),
        ({"attention__key_length": 2_000_000_000}, CheckpointError, "attn_q.weight has shape"),
        ({"attention__head_count": [6, 6, 4]}, CheckpointError, "differs from layer to layer"),
        ({"context_length": "long"}, CheckpointError, "context_length is not an integer"),
        ({"rope__freq_base": "high"}, CheckpointError, "freq_base is not a number"),
    ],
)
def test_metadata_that_cannot_be_is_refused(
    tmp_path: Path, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _config(tmp_path, "llama", None, **metadata)


def test_one_number_a_layer_may_be_an_array(tmp_path: Path) -> None:
    assert _config(tmp_path, feed_forward_length=[FFN] * LAYERS)["intermediate_size"] == FFN


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": ["x"] * (VOCAB + 1)}
    with pytest.raises(CheckpointError, match=f"says {VOCAB + 1} tokens"):
        GgufFile(write_model(tmp_path / "m.gguf", metadata=metadata))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight"])
def test_a_tensor_that_sizes_others_must_be_there(tmp_path: Path, name: str) -> None:
    values = model_values("llama")
    del values[name]
    with pytest.raises(CheckpointError, match=f"has no tensor {name}"):
        GgufFile(write_model(tmp_path / "m.gguf", "llama", values))


def test_an_architecture_must_be_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    content = path.read_bytes().replace(b"general.architecture", b"general.architectur_")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"general\.architecture"):
        GgufFile(path)


@pytest.mark.parametrize("size", [3, 9])
def test_factors_of_another_length_are_refused(tmp_path: Path, size: int) -> None:
    values = model_values("llama") | {"rope_freqs.weight": np.ones(size, np.float32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has shape"):
        GgufFile(write_model(tmp_path / "m.gguf", "llama", values))


def test_contradictory_scalings_are_refused(tmp_path: Path) -> None:
    values = model_values("llama") | {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight and yarn"):
        _config(tmp_path, "llama", values, rope__scaling__type="yarn")
    phi = model_values("phi3") | {"rope_factors_short.weight": np.ones(HEAD_DIM // 2, np.float32)}
    with pytest.raises(CheckpointError, match=r"has no tensor rope_factors_long\.weight"):
        _config(tmp_path, "phi3", phi, rope__scaling__original_context_length=64)


def test_a_factor_without_a_rule_is_linear(tmp_path: Path) -> None:
    """llama.cpp's reading; a file that says "none" means it."""
    expected = {"rope_type": "linear", "factor": 2.5}
    assert _config(tmp_path, rope__scaling__factor=2.5)["rope_scaling"] == expected
    assert _config(tmp_path, rope__scaling__factor=1.0)["rope_scaling"] is None
    assert _config(tmp_path, rope__scaling__type="none", rope__scaling__factor=2.5)["rope_scaling"] is None


def test_two_rules_for_the_frequencies_are_refused(tmp_path: Path) -> None:
    ones = np.ones(HEAD_DIM // 2, np.float32)
    both = {"rope_factors_short.weight": ones, "rope_factors_long.weight": ones}
    original = {"rope__scaling__original_context_length": 64}
    with pytest.raises(UnsupportedModel, match=r"rope_factors_short\.weight and rope_freqs\.weight"):
        _config(tmp_path, "phi3", model_values("phi3") | both | {"rope_freqs.weight": ones}, **original)
    with pytest.raises(UnsupportedModel, match=r"rope_factors_short\.weight and yarn scaling"):
        _config(tmp_path, "phi3", model_values("phi3") | both, rope__scaling__type="yarn", **original)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight and llama\.rope\.scale_linear"):
        _config(
            tmp_path, "llama", model_values("llama") | {"rope_freqs.weight": ones}, rope__scale_linear=2.0
        )
