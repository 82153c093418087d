"""The monokernel without a GPU: it compiles for every shape without spilling, and fills a block's shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from monotape.backends.cuda.compilation import ARCHITECTURE, KERNELS, STANDARD, cuda_core
from monotape.backends.cuda.driver import compile_kernel, resource_usage
from monotape.backends.cuda.header import SHARED_MEMORY, plan_header
from monotape.engine.loading import gpu_plan
from monotape.errors import UnsupportedModel
from monotape.models.lanes import delayed, ladder
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.types import Format
from monotape.weights.open import open_checkpoint
from shapes import SHAPES

H200_PROCESSORS = 132
MOST_REGISTERS = 168  # of a thread
FAMILIES = {
    **SHAPES,
    "qwen2.5-0.5b": {
        **SHAPES["qwen3-0.6b"], "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 24,
    },
    "mistral-7b": {
        **SHAPES["llama-3.1-8b"], "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "rope_scaling": None,
    },
}  # fmt: skip


def spec_of(name: str) -> ModelSpec:
    return spec_from_config({key: value for key, value in FAMILIES[name].items() if value is not None})


def check(header: str, most_stack: int = 0) -> None:
    cubin = compile_kernel(header)
    assert cubin[:4] == b"\x7fELF"
    usage = resource_usage(cubin)
    assert usage.stack_bytes <= most_stack
    assert usage.registers <= MOST_REGISTERS


@pytest.mark.parametrize("name", FAMILIES)
def test_the_decode_path_compiles_for_hopper_without_spilling(name: str) -> None:
    spec = spec_of(name)
    check(plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 4096), prefill=False))


@pytest.mark.parametrize("name", ["llama-3.2-1b", "dense-2b", "qwen3-0.6b", "qwen2.5-0.5b"])
def test_the_whole_kernel_compiles_too(name: str) -> None:
    """Prefill with heads of 128 values keeps a few words outside the registers."""
    spec = spec_of(name)
    wide = spec.head_dim > 64
    check(plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 4096)), most_stack=48 if wide else 0)


@pytest.mark.parametrize("variant", ["fp16", "trace"])
def test_so_do_its_variants(variant: str) -> None:
    spec = spec_of("smollm2-135m")
    fmt = Format.F16 if variant == "fp16" else Format.BF16
    check(plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 4096, fmt), trace=variant == "trace"))


RANKS = {
    "eight of llama-3.1-8b": ("llama-3.1-8b", 8, None, H200_PROCESSORS),
    "two of qwen3-0.6b, a ladder, on one GPU": ("qwen3-0.6b", 2, ladder(2), 66),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_compile_too(name: str) -> None:
    """With heads of 128 values the sampler keeps a few words outside the registers, as prefill does."""
    shape, ranks, lanes, workers = RANKS[name]
    spec = replace(spec_of(shape), lanes=lanes)
    check(plan_header(spec, gpu_plan(spec, workers, 4096, tp=ranks)), most_stack=48)


def test_so_do_experiments_with_slow_links() -> None:
    spec = replace(spec_of("dense-2b"), lanes=delayed(4, 2))
    check(plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 4096), link_delay=True), most_stack=48)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ring_takes_all_shared_memory_that_is_left(name: str, tmp_path: Path) -> None:
    """The host counts what else is there; the compiler knows. Two more pages would not fit."""
    spec = spec_of(name)
    (tmp_path / "plan.h").write_text(plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 4096)))
    source = (
        '#include "ring.h"\n'
        f'static_assert(sizeof(monotape::Shared) <= {SHARED_MEMORY}, "too many pages");\n'
        f'static_assert(sizeof(monotape::Shared) + 2 * monotape::kPageBytes > {SHARED_MEMORY}, "too few pages");\n'
    )
    core = cuda_core()
    options = core.ProgramOptions(arch=ARCHITECTURE, std=STANDARD, include_path=[str(tmp_path), str(KERNELS)])
    assert core.Program(source, "c++", options=options).compile("cubin").code


def test_heads_it_cannot_run_are_refused_by_size(checkpoint: Callable[[str], Path]) -> None:
    spec = spec_from_config(open_checkpoint(checkpoint("llama")).config)
    with pytest.raises(UnsupportedModel, match="heads of 10 values"):
        plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 64))
