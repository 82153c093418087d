"""Mixtures of experts as their configs describe them: real ones, defaults, and what is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from monotape.errors import ModelError, UnsupportedModel
from monotape.models.experts import SILU, Experts, Gating, Softmax
from monotape.models.registry import spec_from_config
from monotape.models.spec import LAYER_ROLES, ModelSpec
from monotape.planner.catalogue import find_model

GPT_OSS, QWEN, CODER, MIXTRAL = "gpt-oss-20b", "qwen3-30b-a3b", "qwen3-coder-30b-a3b", "mixtral-8x7b"


def spec_of(name: str, **changes: Any) -> ModelSpec:
    """The spec of a model of the planner's table with some fields changed; `...` takes a field out."""
    model = find_model(name)
    assert model is not None
    config = copy.deepcopy(dict(model.config)) | {"quantization_config": None} | changes
    return spec_from_config({field: value for field, value in config.items() if value is not ...})


@pytest.mark.parametrize("name", [GPT_OSS, "gpt-oss-120b", QWEN, CODER, MIXTRAL])
def test_real_configs_have_their_published_parameters(name: str) -> None:
    spec, model = spec_of(name), find_model(name)
    assert model is not None and model.published_active is not None
    assert spec.parameters == pytest.approx(model.published_total, rel=0.005)
    # Some count the whole embedding among the active ones, of which a token reads one row.
    table = 0 if "oss" in name else spec.vocab * spec.width
    assert spec.active_parameters + table == pytest.approx(model.published_active, rel=0.02)
    assert set(spec.layer_tensors) <= set(LAYER_ROLES)


def test_gpt_oss_with_everything_said() -> None:
    spec = spec_of(GPT_OSS)
    assert spec.experts == Experts(32, 4, Softmax.CHOSEN)
    assert spec.gating == Gating(alpha=1.702, limit=7.0, shift=1.0)
    assert spec.sinks and spec.qkv_bias and not spec.qk_norm
    assert spec.windows == (128, None) * 12
    assert (spec.rope.magnitude, spec.rope.dims) == (pytest.approx(1.3466, abs=1e-4), 64)
    assert [matrix.name for matrix in spec.layer] == ["qkv", "output", "router", "gate_up", "down"]
    assert all(spec.has_bias(matrix) for matrix in spec.layer)
    assert spec.layer_tensors["up_bias"].in_layer(3, 17) == "model.layers.3.mlp.experts.17.up_proj.bias"
    assert spec.layer_tensors["router_bias"].in_layer(0) == "model.layers.0.mlp.router.bias"
    assert (spec.shape_of("sinks"), spec.shape_of("router"), spec.shape_of("down")) == (
        (64,), (32, 2880), (2880, 2880),
    )  # fmt: skip
    assert spec_of(GPT_OSS, layer_types=...).windows == spec.windows
    assert spec_of(GPT_OSS, swiglu_limit=5.0).gating.limit == 5.0


def test_qwen_and_mixtral_say_how_their_experts_are_weighed() -> None:
    assert spec_of(QWEN).experts == Experts(128, 8, Softmax.CHOSEN)
    assert spec_of(QWEN, norm_topk_prob=False).experts == Experts(128, 8, Softmax.ALL)
    assert spec_of(QWEN, norm_topk_prob=...).experts == Experts(128, 8, Softmax.ALL)
    assert (spec_of(QWEN).ffn, spec_of(QWEN).qk_norm, spec_of(QWEN).gating) == (768, True, SILU)
    assert spec_of(CODER).rope.rule == "theta 1e+07"
    mixtral = spec_of(MIXTRAL)
    assert (mixtral.experts, mixtral.ffn) == (Experts(8, 2, Softmax.CHOSEN), 14336)
    assert mixtral.layer_tensors["up"].in_layer(1, 7) == "model.layers.1.block_sparse_moe.experts.7.w3.weight"
    assert spec_of(MIXTRAL, rope_theta=...).rope.rule == "theta 1e+06"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (QWEN, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN, {"mlp_only_layers": [3]}, "mlp_only_layers"),
        (QWEN, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window"),
        (GPT_OSS, {"attention_bias": False}, "attention_bias"),
        (GPT_OSS, {"rope_scaling": ...}, "rope rule default"),
        (GPT_OSS, {"n_group": 8}, "n_group"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(name: str, changes: Any, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        spec_of(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (QWEN, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, but there are only 128 experts"),
        (QWEN, {"num_local_experts": 64}, "num_local_experts is 64"),
        (GPT_OSS, {"experts_per_token": 2}, "experts_per_token is 2"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit is 0"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(name: str, changes: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(name, **changes)
