"""The second kernel of a model, which checks drafts: for which models there is one, and that it gives the same bits."""

from __future__ import annotations

import pytest

from monotape.compiler.gpu import drafting_plan, gpu_plan
from monotape.models.lanes import Lanes
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from plan.plans import known, spec

DENSE = {
    "135M": spec("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152),
    "0.5B": spec("Qwen2ForCausalLM", 24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True),
    "0.6B": spec("Qwen3ForCausalLM", 28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True),
    "1.5B": spec("Qwen2ForCausalLM", 28, 1536, 12, 2, 128, 8960, 151936, qkv_bias=True),
    "8B": spec("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, tied=False),
}
WINDOWED = spec("MistralForCausalLM", 12, 2880, 64, 8, 64, 2880, 32768, windows=(128, None) * 6)
LANES = spec("LlamaForCausalLM", 25, 2560, 20, 4, 128, 6912, 49152, lanes=Lanes(4, 2))


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_of_any_size_has_four_rows(name: str) -> None:
    alone = gpu_plan(DENSE[name], 132, 4096)
    drafting = drafting_plan(DENSE[name], alone)
    assert drafting is not None and drafting.ranks[0].rows_a_pass == 4
    assert drafting.plan is alone.plan  # the same tapes
    assert drafting.ranks[0].kv == alone.ranks[0].kv


@pytest.mark.parametrize("name", DENSE)
def test_its_sums_have_the_same_order(name: str) -> None:
    """A warp adds up the same blocks of k in as many chains, page after page."""
    alone = gpu_plan(DENSE[name], 132, 4096)
    drafting = drafting_plan(DENSE[name], alone)
    assert drafting is not None
    for one, other in zip(alone.ranks[0].products, drafting.ranks[0].products, strict=True):
        assert (one.page_run, one.together == 1) == (other.page_run, other.together == 1)
    assert drafting.ranks[0].pages.blocks == alone.ranks[0].pages.blocks


@pytest.mark.parametrize(
    ("model", "formats"),
    [
        (WINDOWED, {}),
        (LANES, {}),
        (known("qwen3-30b-a3b"), {}),
        (DENSE["8B"], {"down": Format.FP8}),
        (DENSE["8B"], {"head": Format.Q8}),
    ],
    ids=["windows that differ", "ranks", "experts", "codes", "codes in the head"],
)
def test_models_without_one(model: ModelSpec, formats: dict[str, Format]) -> None:
    assert drafting_plan(model, gpu_plan(model, 132, 4096, stage_formats=formats)) is None


def test_machines_without_a_ring_have_none() -> None:
    assert drafting_plan(DENSE["8B"], gpu_plan(DENSE["8B"], 304, 4096, backend="hip")) is None
