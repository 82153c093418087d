"""The monokernel without a GPU: it compiles for every shape without spilling, and packing round-trips."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from monotape.backends.cuda import driver
from monotape.backends.cuda.header import SHARED_MEMORY, plan_header
from monotape.backends.cuda.packer import BlockPacker, to_bf16
from monotape.engine.loading import gpu_plan
from monotape.errors import UnsupportedModel
from monotape.models.registry import spec_from_config
from monotape.plan.types import TILE_ROWS, Format
from monotape.weights.open import open_checkpoint
from shapes import SHAPES

H200_PROCESSORS = 132
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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernel_compiles_for_hopper_without_spilling(name: str) -> None:
    spec = spec_from_config({key: value for key, value in FAMILIES[name].items() if value is not None})
    cubin = driver.compile_kernel(plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 4096)))
    assert cubin[:4] == b"\x7fELF"
    usage = driver.resource_usage(cubin)
    assert usage.stack_bytes == 0
    assert usage.registers <= 224  # 288 threads of a block share 65,536


def test_the_ring_leaves_no_shared_memory_unused() -> None:
    spec = spec_from_config(SHAPES["llama-3.2-1b"])
    header = plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 4096))
    found = re.search(r"kRingPages = (\d+);", header)
    assert found is not None
    assert SHARED_MEMORY - 4 * PAGE_BYTES < int(found.group(1)) * PAGE_BYTES < SHARED_MEMORY


def test_heads_it_cannot_run_are_refused_by_size(checkpoint: Callable[[str], Path]) -> None:
    spec = spec_from_config(open_checkpoint(checkpoint("llama")).config)
    with pytest.raises(UnsupportedModel, match="heads of 10 values"):
        plan_header(spec, gpu_plan(spec, H200_PROCESSORS, 64))


def test_blocks_hold_every_row_exactly() -> None:
    rows = np.random.default_rng(2).standard_normal((24, 96)).astype(np.float32)
    out = np.empty((3, Format.BF16.tile_bytes(96)), np.uint8)
    assert BlockPacker().pack(Format.BF16, rows, out) == -1
    blocks = out.view(np.uint16).reshape(3, 3, TILE_ROWS, 32)
    assert np.array_equal(blocks.transpose(0, 2, 1, 3).reshape(24, 96), to_bf16(rows))
    back = (to_bf16(rows).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(back, rows, rtol=2**-8)


def test_rows_that_are_not_finite_are_found() -> None:
    rows = np.ones((8, 32), np.float32)
    rows[6, 3] = np.nan
    assert BlockPacker().pack(Format.BF16, rows, np.empty((1, 512), np.uint8)) == 6
