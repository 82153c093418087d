"""How many workers of a GPU a model gets: all of them, unless some would have next to nothing to do."""

from __future__ import annotations

import pytest

from monotape.engine.loading import busy_gpu_plan, gpu_plan, leaves_workers_out
from monotape.errors import UnsupportedModel
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from shapes import SHAPES

PROCESSORS = 132


def small(width: int, kv_heads: int) -> ModelSpec:
    return spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "head_dim": 16,
            "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": kv_heads,
            "intermediate_size": 2 * width, "vocab_size": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": True,
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_models_people_run_get_the_whole_gpu(name: str) -> None:
    spec = spec_from_config(SHAPES[name])
    assert busy_gpu_plan(spec, PROCESSORS, 64) == gpu_plan(spec, PROCESSORS, 64)


@pytest.mark.parametrize("ranks", [None, 2, 4])
@pytest.mark.parametrize("width", [64, 128, 288])
def test_a_small_model_gets_as_many_as_take_part_in_all_of_it(width: int, ranks: int | None) -> None:
    spec = small(width, kv_heads=8)
    assert leaves_workers_out(gpu_plan(spec, PROCESSORS, 64, tp=ranks))
    plan = busy_gpu_plan(spec, PROCESSORS, 64, tp=ranks)
    assert 1 < plan.machine.workers < PROCESSORS
    assert not leaves_workers_out(plan)


def test_a_model_with_more_kv_heads_than_that_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="too small for the CUDA backend") as raised:
        busy_gpu_plan(small(64, kv_heads=16), PROCESSORS, 64)
    assert "--backend cpu" in raised.value.hint
