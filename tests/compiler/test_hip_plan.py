"""Plans for AMD's MI300X: what differs from NVIDIA's, and what is refused. No GPU of AMD has run any of them."""

from __future__ import annotations

import pytest

from monotape.compiler.gpu import gpu_plan
from monotape.errors import PlanError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.plan.gpu_machines import CDNA3, HOPPER
from shapes import SHAPES

WORKERS = 304  # compute units of an MI300X
SPEC = spec_from_config(SHAPES["llama-3.2-1b"])


def test_tapes_are_those_of_nvidia() -> None:
    ours, theirs = gpu_plan(SPEC, WORKERS, 4096, backend="hip"), gpu_plan(SPEC, WORKERS, 4096)
    assert (ours.machine, theirs.machine) == (CDNA3, HOPPER)
    assert ours.plan.ranks[0].tapes == theirs.plan.ranks[0].tapes
    assert ours.digest != theirs.digest


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "dense-2b", "llama-3.1-8b", "qwen3-0.6b"])
def test_a_workers_memory_fits_the_lds(shape: str) -> None:
    rank = gpu_plan(spec_from_config(SHAPES[shape]), WORKERS, 4096, backend="hip").ranks[0]
    assert rank.beside_ring + rank.pages.ring * rank.pages.blocks * 512 <= CDNA3.shared_memory
    assert rank.sampler_words == 1 + CDNA3.consumers // 2


@pytest.mark.parametrize("fmt", [fmt for fmt in GPU_FORMATS if not fmt.is_half])
def test_every_quantised_format_has_a_plan_and_the_tapes_of_nvidia(fmt: Format) -> None:
    formats = dict.fromkeys(("qkv", "output", "gate_up", "down", "head"), fmt)
    ours, theirs = (
        gpu_plan(SPEC, WORKERS, 4096, stage_formats=formats, backend=name) for name in ("hip", "cuda")
    )
    assert ours.plan.ranks[0].tapes == theirs.plan.ranks[0].tapes
    most = CDNA3.coded_words_at_once
    for product in ours.ranks[0].products:  # what a lane has of the tiles that it multiplies at once
        blocks = product.together * -(-product.page_run // CDNA3.parts)
        assert blocks * GPU_FORMATS[product.format].words <= most


def test_a_format_that_no_kernel_reads_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="hip backend do not read f32 weights"):
        gpu_plan(SPEC, WORKERS, 4096, Format.F32, backend="hip")
