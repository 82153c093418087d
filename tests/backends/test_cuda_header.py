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
    [
        ("llama-3.2-1b", None, True), ("qwen3-0.6b", None, True), ("llama-3.1-8b", None, False), ("dense-2b", 4, False),
        ("qwen2.5-0.5b", None, False), ("smollm2-135m", None, False),
    ],
)  # fmt: skip
def test_a_scout_goes_ahead_of_short_layers_that_the_ring_does_not_hold(
    name: str, ranks: int | None, ahead: bool
) -> None:
    spec = spec_from_config(SHAPES[name])
    header = plan_header(gpu_plan(spec, PROCESSORS, 64, tp=ranks))
    assert (int(constant(header, "kLeadBytes")) > 0) is ahead


LIMITS = {
    "no room for inputs of 98,304 values beside its ring": ({"intermediate_size": 98304}, "--tp"),
    "a residual stream of 8,704 values": ({"hidden_size": 8704}, "8,192"),
    "a vocabulary of 262,152 tokens": ({"vocab_size": 262152}, "262,144"),
    "12 query heads to a KV head": ({"num_attention_heads": 24, "num_key_value_heads": 2}, "At most 8"),
}


@pytest.mark.parametrize("sentence", LIMITS)
def test_what_does_not_fit_is_refused_in_one_sentence_before_anything_is_compiled(sentence: str) -> None:
    changes, hint = LIMITS[sentence]
    spec = spec_from_config({**SHAPES["llama-3.1-8b"], **changes})
    with pytest.raises(UnsupportedModel, match=sentence) as raised:
        gpu_plan(spec, PROCESSORS, 64)
    assert hint in raised.value.hint


def test_ranks_make_room() -> None:
    spec = spec_from_config({**SHAPES["llama-3.1-8b"], "intermediate_size": 98304})
    assert gpu_plan(spec, PROCESSORS, 64, tp=4).ranks[0].pages.ring >= 3


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("width", [4096, 8192])
def test_a_prefill_borrows_the_place_of_a_long_input(head_dim: int, width: int) -> None:
    """Llama 3.1 70B's feed-forward of 28,672: beside it the ring alone would be too small for heads of 128."""
    spec = spec_from_config(
        {**SHAPES["llama-3.1-8b"], "hidden_size": width, "head_dim": head_dim, "intermediate_size": 28672}
    )
    own = gpu_plan(spec, PROCESSORS, 64).ranks[0]
    ring = own.pages.ring * own.pages.bytes
    assert own.prefill_bytes == ring + (2 * 28672 if head_dim == 128 else 0)


def test_tapes_of_more_than_64_gib_are_numbered_in_64_bits() -> None:
    small, large = (
        spec_from_config({**SHAPES["llama-3.1-8b"], "num_hidden_layers": layers}) for layers in (32, 200)
    )
    assert constant(plan_header(gpu_plan(small, PROCESSORS, 64)), "kLargeTapes") == "false"
    assert constant(plan_header(gpu_plan(large, PROCESSORS, 64)), "kLargeTapes") == "true"


@pytest.mark.parametrize("ffn", [8192, 11520, 12288, 14336, 16384])
@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(1536, 12, 2), (3072, 24, 8), (3072, 32, 8)])
def test_no_page_is_so_large_that_a_prefill_has_no_room(
    width: int, heads: int, kv_heads: int, ffn: int
) -> None:
    """For most of these the size with the fewest steps would leave three pages, where others leave enough."""
    shape = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    spec = spec_from_config({**SHAPES["llama-3.1-8b"], **shape, "head_dim": 128, "intermediate_size": ffn})
    plan_header(gpu_plan(spec, PROCESSORS, 64))
