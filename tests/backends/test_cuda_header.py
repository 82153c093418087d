"""What plan.h says of plans whose workers have little to do, and of how far ahead the memory reads."""

from __future__ import annotations

import re

import pytest

from monotape.backends.cuda.header import plan_header
from monotape.compiler.gpu import gpu_plan
from monotape.errors import UnsupportedModel
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from shapes import SHAPES

PROCESSORS = 132


def small(width: int) -> ModelSpec:
    return spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "head_dim": 16,
            "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
            "intermediate_size": 2 * width, "vocab_size": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": True,
        }
    )  # fmt: skip


def constant(header: str, name: str) -> str:
    found = re.search(rf"\b{name} = (\w+)", header)
    assert found, f"{name} is not in plan.h"
    return found[1]


@pytest.mark.parametrize("name", SHAPES)
def test_in_models_people_run_every_worker_takes_part(name: str) -> None:
    spec = spec_from_config(SHAPES[name])
    plan = gpu_plan(spec, PROCESSORS, 64)
    assert not plan.ranks[0].scattered
    assert constant(plan_header(plan), "kScattered") == "false"


@pytest.mark.parametrize("ranks", [None, 2, 4])
@pytest.mark.parametrize("width", [64, 128, 288])
def test_the_kernel_is_told_that_a_small_model_leaves_workers_out(width: int, ranks: int | None) -> None:
    spec = small(width)
    plan = gpu_plan(spec, PROCESSORS, 64, tp=ranks)
    assert plan.ranks[0].scattered
    assert constant(plan_header(plan), "kScattered") == "true"
    most = min(min(rank.layer_stages[1].tiles, rank.head.tiles) for rank in plan.plan.ranks)
    few = gpu_plan(spec, most, 64, tp=ranks)
    assert constant(plan_header(few), "kScattered") == "false"


@pytest.mark.parametrize(
    ("name", "ranks", "ahead"),
    [("llama-3.2-1b", None, True), ("llama-3.1-8b", None, False), ("dense-2b", 4, False)],
)
def test_a_scout_goes_ahead_where_layers_are_short(name: str, ranks: int | None, ahead: bool) -> None:
    spec = spec_from_config(SHAPES[name])
    header = plan_header(gpu_plan(spec, PROCESSORS, 64, tp=ranks))
    assert (int(constant(header, "kLeadBytes")) > 0) is ahead


def test_an_input_that_leaves_no_room_for_the_ring_is_refused() -> None:
    spec = spec_from_config({**SHAPES["llama-3.1-8b"], "intermediate_size": 28672})
    with pytest.raises(UnsupportedModel, match="no room for inputs of 28,672 values") as raised:
        plan_header(gpu_plan(spec, PROCESSORS, 64))
    assert "--tp" in raised.value.hint
    plan_header(gpu_plan(spec, PROCESSORS, 64, tp=2))


@pytest.mark.parametrize(("head_dim", "fits"), [(64, True), (96, True), (128, False)])
def test_the_room_that_a_prefill_needs_depends_on_the_heads(head_dim: int, fits: bool) -> None:
    spec = spec_from_config({**SHAPES["llama-3.1-8b"], "head_dim": head_dim, "intermediate_size": 28672})
    plan = gpu_plan(spec, PROCESSORS, 64)
    if fits:
        plan_header(spec, plan)
    else:
        with pytest.raises(UnsupportedModel, match="no room for inputs of 28,672 values"):
            plan_header(spec, plan)


@pytest.mark.parametrize("ffn", [8192, 11520, 12288, 14336, 16384])
@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(1536, 12, 2), (3072, 24, 8), (3072, 32, 8)])
def test_no_page_is_so_large_that_a_prefill_has_no_room(
    width: int, heads: int, kv_heads: int, ffn: int
) -> None:
    """For most of these the size with the fewest steps would leave three pages, where others leave enough."""
    shape = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    spec = spec_from_config({**SHAPES["llama-3.1-8b"], **shape, "head_dim": 128, "intermediate_size": ffn})
    plan_header(gpu_plan(spec, PROCESSORS, 64))
