"""The monokernel without a GPU: it compiles for every shape without spilling, and fills a block's shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from monotape.backends.cuda.compilation import ARCHITECTURE, KERNELS, STANDARD, cuda_core
from monotape.backends.cuda.driver import compile_kernel, resource_usage
from monotape.backends.cuda.header import SHARED_MEMORY, plan_header
from monotape.engine.loading import gpu_plan
from monotape.errors import UnsupportedModel
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


def header_of(kernel: str) -> str:
    """The plan.h of a kernel: "decode llama-3.2-1b" and the like."""
    kind, name = kernel.split()
    spec = spec_of(name)
    plan = gpu_plan(spec, H200_PROCESSORS, 4096, Format.F16 if kind == "fp16" else Format.BF16)
    return plan_header(spec, plan, prefill=kind != "decode", trace=kind == "trace")


def compiled(kernel: str) -> bytes:
    return compile_kernel(header_of(kernel))


@pytest.fixture(scope="module")
def cubins(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[bytes]]]:
    """The kernels that the chosen tests ask for. Compiling is most of what these tests do, and takes one core each."""
    asked = [
        item.callspec.params["kernel"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "kernel" in item.fixturenames
    ]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield {kernel: pool.submit(compiled, kernel) for kernel in asked}
        pool.shutdown(cancel_futures=True)


KERNELS_TO_CHECK = [
    *(f"decode {name}" for name in FAMILIES),
    *(f"whole {name}" for name in ("llama-3.2-1b", "dense-2b", "qwen3-0.6b", "qwen2.5-0.5b")),
    "fp16 smollm2-135m",
    "trace smollm2-135m",
]


@pytest.mark.parametrize("kernel", KERNELS_TO_CHECK)
def test_a_kernel_compiles_for_hopper_without_spilling(kernel: str, cubins: dict[str, Future[bytes]]) -> None:
    """All of it, or the decode path alone. Prefill with heads of 128 values keeps a few words outside the registers."""
    kind, name = kernel.split()
    cubin = cubins[kernel].result()
    assert cubin[:4] == b"\x7fELF"
    usage = resource_usage(cubin)
    assert usage.stack_bytes <= (48 if kind == "whole" and spec_of(name).head_dim > 64 else 0)
    assert usage.registers <= MOST_REGISTERS


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
