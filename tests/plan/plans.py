"""The plans whose text is committed, and the command that writes it anew: python tests/plan/plans.py"""

from __future__ import annotations

from pathlib import Path

from monotape.compiler.compile import compile_plan
from monotape.compiler.gpu import gpu_plan
from monotape.models.lanes import Lanes
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec, Rope
from monotape.plan.formats import Format
from monotape.plan.gpu import GpuPlan
from monotape.plan.gpu_text import dump_gpu
from monotape.plan.text import dump
from monotape.plan.types import Machine, Plan
from monotape.planner.catalogue import find_model

GOLDEN = Path(__file__).parent / "golden"


def spec(
    architecture: str, layers: int, width: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int,
    *, tied: bool = True, qkv_bias: bool = False, qk_norm: bool = False, lanes: Lanes | None = None,
    windows: tuple[int | None, ...] | None = None,
) -> ModelSpec:  # fmt: skip
    """A model's dimensions, without tensors."""
    return ModelSpec(
        family=architecture.lower(), architecture=architecture, layers=layers, width=width, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab, context=4096, norm_eps=1e-5,
        rope=Rope(head_dim, (1.0,) * (head_dim // 2)), tied=tied, qkv_bias=qkv_bias, qk_norm=qk_norm,
        windows=windows or (None,) * layers, layer_tensors={}, model_tensors={}, lanes=lanes,
    )  # fmt: skip


def known(name: str) -> ModelSpec:
    """A model of the planner's table, as its config describes it."""
    model = find_model(name)
    assert model is not None
    return spec_from_config(
        {key: value for key, value in model.config.items() if key != "quantization_config"}
    )


def golden_plans() -> dict[str, Plan]:
    smollm2 = spec("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152)
    qwen = spec("Qwen2ForCausalLM", 24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True)
    mistral = spec("MistralForCausalLM", 32, 4096, 32, 8, 128, 14336, 32768, tied=False)
    laneformer = spec(
        "LaneformerForCausalLM", 15, 3072, 32, 16, 96, 12288, 32000, tied=False, lanes=Lanes(8, 4, "sum")
    )
    eight = Machine("cpu", 1)
    return {
        "smollm2-135m-q8-2-workers": compile_plan(smollm2, Machine("cpu", 2), Format.Q8, context=8192),
        "qwen2.5-0.5b-bf16-6-workers": compile_plan(qwen, Machine("cpu", 6), Format.BF16, context=32768),
        "mistral-7b-f16-16-workers": compile_plan(mistral, Machine("cpu", 16), Format.F16, context=32768),
        "qwen2.5-0.5b-q8-2-ranks": compile_plan(qwen, Machine("cpu", 2), Format.Q8, context=4096, ranks=2),
        "laneformer-2b-bf16-8-lanes": compile_plan(laneformer, eight, Format.BF16, context=4096),
        "qwen3-30b-a3b-bf16-4-workers": compile_plan(
            known("qwen3-30b-a3b"), Machine("cpu", 4), Format.BF16, context=40960
        ),
        "gpt-oss-20b-bf16-2-ranks": compile_plan(
            known("gpt-oss-20b"), Machine("cpu", 3), Format.BF16, context=8192, ranks=2
        ),
    }


def golden_gpu_plans() -> dict[str, GpuPlan]:
    """On an H200, but for one: a dense model, odd widths, a mixture of formats and windows, experts, and ranks."""
    llama = spec("LlamaForCausalLM", 16, 2048, 32, 8, 64, 8192, 128256)
    large = spec("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, tied=False)
    qwen = spec("Qwen2ForCausalLM", 24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True)
    qwen3 = spec("Qwen3ForCausalLM", 28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True)
    windowed = spec(
        "MistralForCausalLM", 12, 2880, 64, 8, 64, 2880, 32768, tied=False, windows=(128, None) * 6
    )
    laneformer = spec("LlamaForCausalLM", 25, 2560, 20, 4, 128, 6912, 49152, lanes=Lanes(4, 2))
    head, stored = {"head": Format.F16}, {"gate_up": Format.MXFP4, "down": Format.MXFP4}
    return {
        "h200-llama-3.2-1b-bf16": gpu_plan(llama, 132, 8192),
        "h200-llama-3.1-8b-f16": gpu_plan(large, 132, 8192, Format.F16),
        "h200-qwen2.5-0.5b-bf16": gpu_plan(qwen, 132, 32768),
        "h200-qwen3-0.6b-bf16-f16-head": gpu_plan(qwen3, 132, 4096, stage_formats=head),
        "h200-windows-of-128-and-full": gpu_plan(windowed, 132, 4096),
        "h200-dense-2b-4-lanes": gpu_plan(laneformer, 132, 4096),
        "h200-gpt-oss-20b-mxfp4": gpu_plan(known("gpt-oss-20b"), 132, 8192, stage_formats=stored),
        "h200-qwen3-30b-a3b-bf16": gpu_plan(known("qwen3-30b-a3b"), 132, 8192),
        "a-quarter-of-llama-3.2-1b-2-ranks": gpu_plan(llama, 33, 4096, tp=2),
    }


def golden_texts() -> dict[str, str]:
    texts = {name: dump(plan) for name, plan in golden_plans().items()}
    return texts | {name: dump_gpu(plan) for name, plan in golden_gpu_plans().items()}


if __name__ == "__main__":
    for name, text in golden_texts().items():
        (GOLDEN / f"{name}.txt").write_text(text)
        print("wrote", name)
