"""The monokernel without a GPU: it compiles for every shape without spilling, and fills a block's shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from monotape.backends.cuda.compilation import ARCHITECTURE, KERNELS, STANDARD, cuda_core
from monotape.backends.cuda.driver import compile_kernel, resource_usage
from monotape.backends.cuda.header import Variant, plan_header
from monotape.compiler.gpu import Tuning, drafting_plan, gpu_plan
from monotape.errors import UnsupportedModel
from monotape.models.lanes import Lanes, delayed, ladder
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.gpu_machines import SHARED_MEMORY, WORDS_AT_ONCE
from monotape.weights.open import open_checkpoint
from shapes import SHAPES

pytestmark = pytest.mark.long

H200_PROCESSORS = 132
MOST_REGISTERS = 168  # of a thread
FAMILIES = {
    **SHAPES,
    "mistral-7b": {
        **SHAPES["llama-3.1-8b"], "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "rope_scaling": None,
    },
}  # fmt: skip


def spec_of(name: str) -> ModelSpec:
    return spec_from_config({key: value for key, value in FAMILIES[name].items() if value is not None})


@dataclass(frozen=True, slots=True)
class Kernel:
    """One that must compile; `most_stack`: bytes that may be kept outside the registers."""

    shape: str
    workers: int = H200_PROCESSORS
    lanes: Lanes | None = None
    tp: int | None = None
    fmt: Format = Format.BF16
    variant: Variant | None = None
    tuning: Tuning | None = None
    most_stack: int = 0
    kv: Format | None = None
    formats: Mapping[str, Format] | None = None
    drafts: bool = False

    def header(self) -> str:
        spec = spec_of(self.shape)
        spec = spec if self.lanes is None else replace(spec, lanes=self.lanes)
        plan = gpu_plan(
            spec,
            self.workers,
            4096,
            self.fmt,
            self.tp,
            tuning=self.tuning,
            kv_format=self.kv,
            stage_formats=self.formats,
        )
        if self.drafts:
            drafting = drafting_plan(spec, plan)
            assert drafting is not None
            plan = drafting
        return plan_header(plan, variant=self.variant)


RANKED = 8  # of many ranks the position of a token waits there until the next has been chosen
#: 16 for the gate's two times of a pass, which are indexed once a pass; the rest for three values of the loop over
#: passes, which are read once a tile at most.
DRAFTS = 32
#: As they run; the others without their prefill, which compiles in less time.
WHOLE = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen2.5-1.5b", "dense-2b", "qwen3-0.6b")
INT4 = {**dict.fromkeys(("qkv", "output", "gate_up", "down"), Format.INT4_G128), "head": Format.Q8}
KERNELS_TO_CHECK = {
    **{
        f"decode path of {name}": Kernel(name, variant=Variant(prefill=False))
        for name in FAMILIES
        if name not in WHOLE
    },
    **{f"all of {name}": Kernel(name) for name in WHOLE},
    "smollm2-135m in fp16": Kernel("smollm2-135m", fmt=Format.F16),
    "smollm2-135m with a trace": Kernel("smollm2-135m", variant=Variant(trace=True)),
    "eight ranks of llama-3.1-8b": Kernel("llama-3.1-8b", tp=8, most_stack=RANKED),
    "two ranks of qwen3-0.6b, a ladder, on one GPU": Kernel("qwen3-0.6b", 66, ladder(2), 2),
    "llama-3.1-8b with KV in 8 bits": Kernel("llama-3.1-8b", kv=Format.FP8),
    "llama-3.2-1b in INT4": Kernel("llama-3.2-1b", formats=INT4),
    "llama-3.2-1b for drafts": Kernel("llama-3.2-1b", drafts=True, most_stack=DRAFTS),
    "qwen2.5-0.5b for drafts": Kernel("qwen2.5-0.5b", drafts=True, most_stack=DRAFTS),
    "experiments with slow links": Kernel("dense-2b", lanes=delayed(4, 2), tuning=Tuning(link_delay=True)),
}


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
        yield {kernel: pool.submit(compile_kernel, KERNELS_TO_CHECK[kernel].header()) for kernel in asked}
        pool.shutdown(cancel_futures=True)


#: Their kernels differ from others only in numbers, or are a part of others.
ALIKE = {
    *(f"decode path of {name}" for name in FAMILIES if name not in ("llama-3.1-8b", *WHOLE)),
    *(f"all of {name}" for name in ("dense-2b", "qwen3-0.6b")), "experiments with slow links",
}  # fmt: skip


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(name, marks=pytest.mark.wide if name in ALIKE else ()) for name in KERNELS_TO_CHECK],
)
def test_a_kernel_compiles_for_hopper_without_spilling(kernel: str, cubins: dict[str, Future[bytes]]) -> None:
    cubin = cubins[kernel].result()
    assert cubin[:4] == b"\x7fELF"
    usage = resource_usage(cubin)
    assert usage.stack_bytes <= KERNELS_TO_CHECK[kernel].most_stack
    assert usage.registers <= MOST_REGISTERS


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ring_takes_all_shared_memory_that_is_left(name: str, tmp_path: Path) -> None:
    """The host counts what else is there; the compiler knows."""
    spec = spec_of(name)
    plan = gpu_plan(spec, H200_PROCESSORS, 4096)
    (tmp_path / "plan.h").write_text(plan_header(plan))
    source = (
        '#include "token/matrix.h"\nusing namespace monotape;\n'
        f'static_assert(sizeof(Shared) <= {SHARED_MEMORY}, "too many pages");\n'
        f'static_assert(sizeof(Shared) + 2 * kPageBytes > {SHARED_MEMORY}, "too few pages");\n'
        "constexpr int kWords = 4 * most_vectors_at_once() + most_extra_at_once();\n"
        f'static_assert(kWords <= {WORDS_AT_ONCE}, "more than registers hold");\n'
    )
    core = cuda_core()
    options = core.ProgramOptions(arch=ARCHITECTURE, std=STANDARD, include_path=[str(tmp_path), str(KERNELS)])
    assert core.Program(source, "c++", options=options).compile("cubin").code


def test_heads_it_cannot_run_are_refused_by_size(checkpoint: Callable[[str], Path]) -> None:
    spec = spec_from_config(open_checkpoint(checkpoint("llama")).config)
    with pytest.raises(UnsupportedModel, match="heads of 10 values"):
        gpu_plan(spec, H200_PROCESSORS, 64)
