"""A file that ties its head and stores another one: every backend takes the stored head, as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import PROMPT, cpu, distance, reference
from backends.fake_cuda import FakeCuda, fake_gpu
from backends.test_cuda_loading import check, gpu_plan, load_model
from families import transformers_logits
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.open import open_checkpoint
from monotape.weights.tied import EMBEDDINGS, HEAD

Folder = Callable[[float], Path]


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Folder:
    """A tied Qwen2 with a head of its own in the file: the embedding, one row of it scaled."""

    def make(scale: float) -> Path:
        from safetensors.numpy import load_file, save_file

        made = checkpoint("qwen2")
        tensors: dict[str, NDArray[np.float32]] = load_file(made / "model.safetensors")
        assert HEAD not in tensors
        tensors[HEAD] = tensors[EMBEDDINGS[0]].copy()
        tensors[HEAD][77] *= scale
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text((made / "config.json").read_text())
        return tmp_path

    return make


@pytest.mark.parametrize("scale", [1.0, 1.02, -3.0])
def test_the_stored_head_is_the_one_that_runs(folder: Folder, scale: float) -> None:
    made = folder(scale)
    spec = spec_from_config(open_checkpoint(made).config)
    assert spec.tied == (scale == 1.0)
    assert bool(spec.notes) == (scale != 1.0)
    want = transformers_logits(made, list(PROMPT))
    slow = reference(made)
    assert distance(slow.logits(PROMPT, slow.new_sequence()), want) < 1e-5
    with cpu(made, "f32") as fast:
        assert distance(fast.logits(PROMPT, fast.new_sequence()), want) < 1e-5


def test_the_stored_head_is_on_the_tapes_of_a_gpu(folder: Folder) -> None:
    opened = open_checkpoint(folder(-3.0))
    spec = spec_from_config(opened.config)
    plan = gpu_plan(spec, Format.F16)
    assert plan.ranks[0].head.parts[0].role == "head"
    with fake_gpu(FakeCuda()):
        loaded = load_model(spec, plan, opened)
        check(loaded, spec, plan, opened, 2**-10, 2**-24)
        assert "embedding" in loaded.memories
