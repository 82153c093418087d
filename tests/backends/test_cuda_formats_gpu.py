"""Quantised weights on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_formats_gpu.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import distance
from backends.host_setups import CONTEXT
from backends.quantised_rows import encoded_run
from backends.test_kernel_formats import SETUPS, as_stored, made_for
from backends.test_kernel_seams import TOKENS, TOLERANCE, reference_logits
from monotape.backends.cuda import packing
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.detection import why_not
from monotape.backends.cuda.driver import processors
from monotape.compiler.gpu import gpu_plan
from monotape.weights.open import open_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
]


@pytest.mark.parametrize("setup", SETUPS)
def test_a_format_is_as_good_as_its_values(
    tmp_path: Path, setup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "coded_run", encoded_run)
    folder, spec, formats = made_for(setup, tmp_path / "model")
    plan = gpu_plan(spec, processors(), CONTEXT, stage_formats=formats)
    backend = CudaBackend.load(spec, plan, open_checkpoint(folder))
    try:
        seen = [
            [backend.logits(TOKENS[:60], backend.new_sequence(), chunk) for _ in range(3)]
            for chunk in (None, 0)
        ]
    finally:
        backend.close()
    as_stored(folder, spec, formats)
    exact = reference_logits(folder, spec, TOKENS[:60])
    for logits in seen:
        assert distance(logits[0], exact) < TOLERANCE
        assert all(np.array_equal(logits[0], again) for again in logits[1:])
