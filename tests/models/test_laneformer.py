"""The Laneformer family: what its config.json means, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from lane_models import config
from monotape.errors import ModelError, UnsupportedModel
from monotape.models.lanes import Lanes
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec, TensorSource

#: What is public about kogai/laneformer-2b-it; the sizes are the only ones that give the parameters counted in it.
LANEFORMER_2B = {
    "architectures": ["LaneformerForCausalLM"], "model_type": "laneformer", "hidden_size": 3072,
    "intermediate_size": 12288, "num_hidden_layers": 15, "num_attention_heads": 32, "num_key_value_heads": 16,
    "vocab_size": 32000, "max_position_embeddings": 4096, "sliding_window": 2048, "swa_layers": list(range(10)),
    "num_lanes": 8, "broadcast_delay": 2, "use_early_comm": True, "use_attention_comm": True, "use_mlp_comm": True,
    "lm_head_type": "replicate", "pre_norm_lane_agg": False, "replicated_rmsn_scale": True, "rope_theta": 10000.0,
    "norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "multiple_of": 32, "depth_init": True, "use_flex_attn": False, "attn_mask_type": "causal", "use_cache": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_laneformer.LaneformerForCausalLM"},
}  # fmt: skip


def spec_of(**changes: Any) -> ModelSpec:
    return spec_from_config(config(**changes))


def test_laneformer_2b() -> None:
    spec = spec_from_config(LANEFORMER_2B)
    assert spec.parameters == 2_320_069_632
    assert (spec.head_dim, spec.context, spec.dtype) == (96, 4096, "bfloat16")
    assert spec.windows == (2048,) * 10 + (None,) * 5
    assert spec.rope.interleaved
    assert spec.lanes == Lanes(8, 4, "sum", early_modules=4)
    assert spec.layer_tensors["q"] == TensorSource("model.layers.{layer}.attention.wq.weight", None, 8)
    assert spec.layer_tensors["down"].split == "columns"


def test_the_trainers_own_files_count_sliding_layers() -> None:
    older = {"swa_layers": None, "architectures": ["LaneformerTPForCausalLM"], "model_type": "laneformer_tp"}
    assert spec_of(**older, sliding_window_n_layers=3).windows == (11, 11, 11, None)
    assert spec_of(**older, sliding_window_n_layers=-1).windows == (None, None, None, 11)
    assert spec_of(**older, sliding_window_n_layers=3, unclamped_layers=[1]).windows == (11, None, 11, None)
    assert spec_of(**older).windows == (None,) * 4
    listed = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert spec_of(**older, layer_types=listed).windows == (11, None, None, 11)


def test_delays_in_layers_and_in_modules() -> None:
    assert spec_of(broadcast_delay=3).lanes == Lanes(4, 6, early_modules=6)
    assert spec_of(broadcast_delay=None, broadcast_delay_modules=3).lanes == Lanes(4, 3, early_modules=3)
    assert spec_of(broadcast_delay=2, broadcast_delay_modules=4).lanes == Lanes(4, 4, early_modules=4)
    assert spec_of(use_comm=False).lanes == Lanes(
        4, None, early_modules=2, attention=False, feed_forward=False
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lane_dropout": 0.1}, "lane_dropout = 0.1, a field that LaneformerForCausalLM does not know"),
        ({"lm_head_type": "mixture"}, 'lm_head_type = "mixture"'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"rope_interleaved": False}, "rope_interleaved = false"),
        ({"attn_mask_type": "block_causal"}, "attn_mask_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope rule yarn"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 3}, r"num_lanes is 3, but must divide num_attention_heads \(8\)"),
        ({"num_key_value_heads": 2}, r"must divide num_key_value_heads \(2\)"),
        ({"intermediate_size": 74}, r"must divide intermediate_size \(74\)"),
        ({"num_lanes": None}, "has no field num_lanes"),
        ({"broadcast_delay": None}, "has no field broadcast_delay"),
        ({"broadcast_delay": -1}, "broadcast_delay is -1"),
        ({"broadcast_delay_modules": 3}, "broadcast_delay is 1 layers"),
        ({"head_dim": 8}, "makes it 6"),
        ({"swa_layers": [0, 4]}, "integers from 0 to 3"),
        ({"swa_layers": [0, 0]}, "listed twice"),
        ({"swa_layers": [0], "sliding_window_n_layers": 2}, "swa_layers lists other layers"),
        ({"layer_types": ["full_attention"] * 4}, r"layers \[0, 1\] slide"),
        ({"sliding_window": None}, "need one"),
        ({"lm_head_type": "lane", "pre_norm_lane_agg": True}, "only a replicated head adds up"),
        ({"lm_head_type": "vocab_parallel", "vocab_size": 131}, r"must divide vocab_size \(131\)"),
        ({"lm_head_type": "lane", "tie_word_embeddings": True}, "only a replicated head can be the embedding"),
        ({"ladder_residual": True, "broadcast_delay": 0}, "a ladder needs sums"),
        ({"ladder_residual": True, "num_lanes": 1}, "a ladder needs at least two lanes"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"model_type": "llama"}, "one of the laneformer family"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads"),
        ({"hidden_size": 50}, "must divide hidden_size"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**changes)
