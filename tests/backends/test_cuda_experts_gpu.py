"""Experts on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_experts_gpu.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.host_setups import CONTEXT
from backends.test_kernel_experts import CASES, TOKENS, TOLERANCE, middle, opened, reference_logits
from families import make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.detection import why_not
from monotape.backends.cuda.driver import processors
from monotape.backends.protocol import Job
from monotape.compiler.gpu import gpu_plan
from monotape.engine.asked import Asked, formats_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
]


@pytest.mark.parametrize(("workers", "dtype"), [(None, "auto"), (7, "auto"), (None, "int4"), (None, "fp8")])
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_the_reference(tmp_path: Path, name: str, workers: int | None, dtype: str) -> None:
    folder = make_checkpoint(CASES[name], tmp_path / name, "bfloat16")
    spec, checkpoint = opened(folder)
    source, formats = formats_for("cuda", Asked(dtype, "auto", "auto"), spec, checkpoint)
    plan = gpu_plan(spec, workers or processors(), CONTEXT, formats.default, stage_formats=formats.of_stages)
    backend = CudaBackend.load(spec, plan, source)
    try:
        seen = [
            [backend.logits(TOKENS, backend.new_sequence(), chunk) for _ in range(3)] for chunk in (None, 0)
        ]
        answers = [list(backend.start(Job(tuple(TOKENS), 0, 60), backend.new_sequence())) for _ in range(3)]
    finally:
        backend.close()
    exact = reference_logits(spec, source, TOKENS)
    for logits in seen:
        assert middle(logits[0], exact) < TOLERANCE
        assert all(np.array_equal(logits[0], again) for again in logits[1:])
    assert len({tuple(token.id for token in answer) for answer in answers}) == 1
