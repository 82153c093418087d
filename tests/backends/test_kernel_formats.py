"""Quantised weights in the kernel, tokens and rows, on the host's machine: as good as the values they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from backends.cpu_cases import distance
from backends.host_setups import CONTEXT, on_machines
from backends.quantised_rows import ENCODERS, decoded, encoded_run, whole_blocks
from backends.test_kernel_seams import NARROW, TOKENS, TOLERANCE, logits_of, on_host, reference_logits
from families import Case, make_checkpoint
from monotape.backends.cuda import packing
from monotape.compiler.gpu import gpu_plan
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.weights.open import open_checkpoint
from monotape.weights.tapes import source_of, tensor_name

pytestmark = pytest.mark.usefixtures("compiled_soon")

STAGES = ("qkv", "output", "gate_up", "down", "head")
#: Each kernel has a format a stage, so that few kernels are compiled. The embedding is the last format's.
SETUPS = {
    "floats": (Format.FP8, Format.MXFP4, Format.FP8_BLOCK, Format.FP8, Format.FP8_BLOCK),
    "int4": (Format.INT4_G32, Format.INT4_G64Z, Format.INT4_G128, Format.INT4_G64, Format.INT4_G32Z),
    "GGUF": (Format.Q5_0, Format.Q4_1, Format.INT4_G128Z, Format.INT8, Format.Q8),
    "K-quants": (Format.K_MIXED, Format.Q4_K, Format.Q5_K, Format.Q6_K, Format.Q6_K),
    "wide, 16 bits": (Format.WIDE, Format.BF16, Format.MXFP4, Format.F16, Format.MXFP4),
}
#: Where all stages have one format, the kernel knows no other. A kernel more takes long to compile.
ONE_FORMAT = (Format.INT4_G128Z,) * 5


def test_every_format_is_in_a_setup() -> None:
    assert {fmt for formats in SETUPS.values() for fmt in formats} == set(GPU_FORMATS)


def as_stored(folder: Path, spec: ModelSpec, formats: Mapping[str, Format]) -> None:
    """Rewrites a checkpoint as the values that its formats have."""
    import torch

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for stage in gpu_plan(spec, 3, CONTEXT).plan.ranks[0].stages:
        fmt = formats[stage.name]
        if fmt not in ENCODERS:
            continue
        for part in stage.parts:
            for layer in [None] if part.role in spec.model_tensors else range(spec.layers):
                name = tensor_name(source_of(spec, part.role, layer), layer)
                values = tensors[name].float().numpy()
                padded = np.pad(values, ((0, -len(values) % TILE_ROWS), (0, 0)))
                seen = decoded(fmt, ENCODERS[fmt](whole_blocks(padded)))
                tensors[name] = torch.from_numpy(seen[: len(values), : values.shape[1]].copy())
    save_file(tensors, path, {"format": "pt"})


def made_for(setup: str, folder: Path) -> tuple[Path, ModelSpec, dict[str, Format]]:
    """A model, and the format of each of its stages."""
    fields = {**NARROW, "hidden_size": 72, "intermediate_size": 300, "tie_word_embeddings": setup != "int4"}
    made = make_checkpoint(Case("formats", "qwen2", fields), folder)
    formats = dict(zip(STAGES, SETUPS.get(setup, ONE_FORMAT), strict=True))
    return made, spec_from_config(open_checkpoint(made).config), formats


@on_machines(
    "setup", [*SETUPS, pytest.param("one format", marks=pytest.mark.long)], hip=(0, 2, 3), fixture="gpu"
)
def test_a_format_is_as_good_as_its_values(
    tmp_path: Path, gpu: str, setup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "coded_run", encoded_run)
    folder, spec, formats = made_for(setup, tmp_path / "model")
    plan = gpu_plan(spec, 3, CONTEXT, stage_formats=formats, backend=gpu)
    with on_host(folder, spec, plan) as backend:
        rows, tokens = logits_of(backend, TOKENS[:20], None), logits_of(backend, TOKENS[:7], 0)
    plain = reference_logits(folder, spec, TOKENS[:20])
    as_stored(folder, spec, formats)
    exact = reference_logits(folder, spec, TOKENS[:20])
    for seen in (rows, tokens):
        wanted, unrounded = exact[: len(seen[0])], plain[: len(seen[0])]
        assert distance(seen[0], wanted) < TOLERANCE
        assert 2 * distance(seen[0], wanted) < distance(wanted, unrounded)  # the formats make a difference
        assert np.array_equal(*seen)


@pytest.mark.long
@on_machines(fixture="gpu")
def test_an_input_that_a_warp_polls_in_several_rounds(
    tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round has a scale of its own where activations become integers."""
    monkeypatch.setattr(packing, "coded_run", encoded_run)
    count = 3 if gpu == "cuda" else 1
    fields = {**NARROW, "hidden_size": 2176, "intermediate_size": 2200, "num_hidden_layers": 1}
    folder = make_checkpoint(Case("wide", "qwen2", fields), tmp_path / "model")
    spec = spec_from_config(open_checkpoint(folder).config)
    kinds = (Format.INT4_G128, Format.INT8, Format.Q4_K, Format.Q8, Format.INT4_G32Z)
    formats = dict(zip(STAGES, kinds, strict=True))
    plan = gpu_plan(spec, 3, CONTEXT, stage_formats=formats, backend=gpu)
    with on_host(folder, spec, plan) as backend:
        seen = logits_of(backend, TOKENS[:count], 0)
    as_stored(folder, spec, formats)
    assert distance(seen[0], reference_logits(folder, spec, TOKENS[:count])) < TOLERANCE
