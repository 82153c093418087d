"""The monokernel for AMD's MI300X, compiled and disassembled; no test here runs it, and no GPU of AMD has."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.test_laneformer import LANEFORMER_2B
from monotape.backends.cuda.compilation import KERNELS
from monotape.backends.cuda.header import plan_header
from monotape.backends.cuda.params import die_bytes, exchange_bytes, sampler_bytes
from monotape.backends.hip.compilation import (
    OPTIONS,
    code_usage,
    compile_kernel,
    disassembly,
    find_compiler,
)
from monotape.compiler.gpu import gpu_plan
from monotape.errors import BackendUnavailable
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.plan.gpu_machines import CDNA3
from shapes import SHAPES

pytestmark = pytest.mark.long

MI300X_WORKERS = 304
MOST_REGISTERS = 168  # a lane's share, with twelve waves on a compute unit
_POLLS_ON_DIE = ("global_atomic_or_x2", "flat_atomic_or_x2")
REQUIRED = "MONOTAPE_REQUIRE_CLANG"  # set in CI: these tests fail without the compiler
#: laneformer is on eight ranks, which have the same kernel.
NAMED = {
    **SHAPES,
    "laneformer-2b": LANEFORMER_2B,
}
_LAYERS = ("qkv", "output", "gate_up", "down")
#: llama-3.2-1b, its weights as codes.
QUANTISED = {
    "int4": {**dict.fromkeys(_LAYERS, Format.INT4_G128), "head": Format.Q8},
    "K-quants": {**dict.fromkeys(_LAYERS, Format.Q4_K), "down": Format.Q6_K, "head": Format.Q6_K},
}

COMPILED = (*NAMED, *QUANTISED)
#: What all but one test looks at, and one of each kind of layers, heads and weights.
DIFFERENT = ("llama-3.2-1b", "llama-3.1-8b", "qwen2.5-0.5b", "laneformer-2b", *QUANTISED)


@pytest.fixture(scope="module")
def compiler() -> str:
    try:
        return find_compiler()
    except BackendUnavailable as error:
        if os.environ.get(REQUIRED, "") not in ("", "0"):
            raise
        pytest.skip(f"{error}")


@pytest.fixture(scope="module")
def codes(compiler: str, request: pytest.FixtureRequest) -> dict[str, bytes]:
    """Of what the chosen tests ask for, two at a time."""
    asked = {
        item.callspec.params["shape"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "shape" in item.fixturenames
    }
    shapes = [shape for shape in COMPILED if shape in asked or shape == "llama-3.2-1b"]

    def compiled(shape: str) -> bytes:
        spec, formats = spec_from_config(NAMED.get(shape, SHAPES["llama-3.2-1b"])), QUANTISED.get(shape)
        plan = gpu_plan(spec, MI300X_WORKERS, 4096, stage_formats=formats, backend="hip")
        (header,) = {plan_header(plan, rank=rank) for rank in range(len(plan.ranks))}
        return compile_kernel(header)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(shapes, pool.map(compiled, shapes), strict=True))


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape in DIFFERENT else pytest.mark.wide) for shape in COMPILED]
)
def test_a_kernel_fits_the_registers_of_a_compute_unit(codes: dict[str, bytes], shape: str) -> None:
    usage = code_usage(codes[shape])
    assert usage.vector_registers <= MOST_REGISTERS
    assert usage.scratch_bytes == usage.vector_spills == 0
    assert usage.lds_bytes + CDNA3.shared_memory <= 64 * 1024


def test_copies_of_dies_lie_where_the_host_has_them(compiler: str, tmp_path: Path) -> None:
    plan = gpu_plan(spec_from_config(SHAPES["qwen3-0.6b"]), MI300X_WORKERS, 4096, backend="hip")
    own, workers = plan.ranks[0], plan.workers
    (tmp_path / "plan.h").write_text(plan_header(plan))
    end = exchange_bytes(own, workers) + die_bytes(plan.machine, own, workers)
    (tmp_path / "sizes.cu").write_text(
        '#include "exchange/dies.h"\nusing namespace monotape;\n'
        f"constexpr int kEnd = divide_up(sizeof(Exchange), kLineBytes) * kLineBytes + sizeof(Copies);\n"
        f'static_assert(sizeof(Exchange) == {exchange_bytes(own, workers)} && kEnd == {end}, "as the host has it");\n'
        f'static_assert(kDies == {plan.machine.dies} && kLanes == {plan.machine.lanes}, "the machine");\n'
        "constexpr int kSampler = divide_up(3 * kWorkers * kSamplerWords * 16, kLineBytes) * kLineBytes;\n"
        f"static_assert(kSampler + sizeof(SamplerCopies) == {sampler_bytes(plan.machine, own, workers)},"
        ' "the sampler\'s words");\n'
    )
    command = [
        compiler,
        *OPTIONS,
        "-fsyntax-only",
        f"-I{tmp_path}",
        f"-I{KERNELS}",
        str(tmp_path / "sizes.cu"),
    ]
    subprocess.run(command, check=True)


def test_laneformer_is_on_eight_ranks() -> None:
    assert len(gpu_plan(spec_from_config(LANEFORMER_2B), MI300X_WORKERS, 4096, backend="hip").ranks) == 8


def test_words_have_the_scope_of_the_agent_and_weights_pass_the_caches(codes: dict[str, bytes]) -> None:
    """sc1: what all dies see. sc0 sc1: what other GPUs and the host see. nt: read once, leaves the caches first."""
    lines = disassembly(codes["llama-3.2-1b"])
    loads = [line for line in lines if line.startswith(("global_load_dwordx2", "flat_load_dwordx2"))]
    stores = [line for line in lines if line.startswith(("global_store_dwordx2", "flat_store_dwordx2"))]
    assert sum(line.endswith(" sc1") for line in loads) > 20
    assert any(line.endswith(" sc1") for line in stores)
    assert any(line.endswith(" sc0 sc1") for line in stores)
    # A die's own copy: atomics that return what they found (sc0), and stores, neither of the agent's scope.
    assert sum(line.startswith(_POLLS_ON_DIE) and line.endswith(" sc0") for line in lines) > 20
    assert any(line.endswith(" sc0") for line in stores)
    weights = [line for line in lines if "load_dwordx4" in line and line.endswith(" nt")]
    assert len(weights) > 10
    assert sum("v_mfma_f32_16x16x16_bf16" in line for line in lines) > 20
    assert any(line.startswith("buffer_wbl2 sc1") for line in lines)
    assert any(line.startswith("buffer_inv sc1") for line in lines)
