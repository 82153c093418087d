"""Where the GPU plan can grow, on the host's machine: formats by stage, layer kinds, weights chosen at run time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from backends.cpu_cases import distance
from backends.host_kernel import HostKernel, Schedule, host_gpu
from backends.host_setups import CONTEXT, DEADLINE_NS, SMALL, TOLERANCE, VOCAB, Logits, on_machines
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.reference.backend import ReferenceBackend
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.engine.formats import gpu_formats
from monotape.engine.loading import load_backend
from monotape.errors import UnsupportedModel
from monotape.models.layer import Matrix
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec, TensorSource
from monotape.models.tensors import LAYER
from monotape.plan.formats import Format
from monotape.plan.gpu import GpuPlan
from monotape.weights.open import open_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("compiled_soon")]

NARROW = {**SMALL, "hidden_size": 20, "head_dim": 16, "num_attention_heads": 4}
TOKENS = np.random.default_rng(11).integers(3, VOCAB, 100).tolist()
SCHEDULES = (Schedule(1), Schedule(2, stalls_per_million=1000, stall_steps=100_000, delay_steps=2000))


@contextmanager
def on_host(folder: Path, spec: ModelSpec, plan: GpuPlan) -> Iterator[CudaBackend]:
    with host_gpu():
        backend = CudaBackend.load(spec, plan, open_checkpoint(folder))
        backend._params.deadline_ns = DEADLINE_NS
        try:
            yield backend
        finally:
            backend.close()


def reference_logits(folder: Path, spec: ModelSpec, tokens: Sequence[int]) -> Logits:
    backend = load_backend("reference", spec, open_checkpoint(folder), dtype="f32", context=CONTEXT)
    assert isinstance(backend, ReferenceBackend)
    return backend.logits(tokens, backend.new_sequence())


def logits_of(backend: CudaBackend, tokens: Sequence[int], chunk: int | None) -> list[Logits]:
    """In every order of events."""
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        seen.append(backend.logits(tokens, backend.new_sequence(), chunk))
    return seen


def store_as(folder: Path, dtype: str, *names: str) -> None:
    """Rewrites some tensors of a checkpoint in another 16-bit format."""
    import torch

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors |= {name: tensors[name].to(getattr(torch, dtype)) for name in names}
    save_file(tensors, path, {"format": "pt"})


@on_machines(
    "chunk, tied",
    [(chunk, tied) for chunk in (None, 0) for tied in (False, True)],
    hip=(1,),
    fixture="gpu",
)
def test_a_head_of_another_format_than_the_layers(
    tmp_path: Path, gpu: str, chunk: int | None, tied: bool
) -> None:
    """fp16 in the head, bf16 in the layers, each exactly as stored; a tied embedding is read off the fp16 head."""
    case = Case("mixed", "llama", {**NARROW, "tie_word_embeddings": tied})
    folder = make_checkpoint(case, tmp_path / "mixed", "bfloat16")
    store_as(folder, "float16", "model.embed_tokens.weight" if tied else "lm_head.weight")
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    formats = gpu_formats(spec, checkpoint)
    assert (formats.default, formats.of_stages) == (Format.BF16, {"head": Format.F16})
    plan = gpu_plan(spec, 3, CONTEXT, formats.default, stage_formats=formats.of_stages, backend=gpu)
    tokens = TOKENS[:12]
    exact = reference_logits(folder, spec, tokens)
    with on_host(folder, spec, plan) as backend:
        seen = logits_of(backend, tokens, chunk)
    assert distance(seen[0], exact) < TOLERANCE
    assert np.array_equal(*seen)


@on_machines(
    "formats", [{"output": Format.F16}, {"qkv": Format.F16, "down": Format.F16}], hip=(1,), fixture="gpu"
)
def test_any_stage_may_have_a_format_of_its_own(tmp_path: Path, gpu: str, formats: dict[str, Format]) -> None:
    folder = make_checkpoint(Case("stages", "llama", NARROW), tmp_path / "stages")
    spec = spec_from_config(open_checkpoint(folder).config)
    plan = gpu_plan(spec, 3, CONTEXT, stage_formats=formats, backend=gpu)
    exact = reference_logits(folder, spec, TOKENS[:10])
    with on_host(folder, spec, plan) as backend:
        rows, tokens = (backend.logits(TOKENS[:10], backend.new_sequence(), chunk) for chunk in (None, 0))
    assert distance(rows, exact) < TOLERANCE
    assert distance(tokens, exact) < TOLERANCE


def windows_of(name: str, folder: Path) -> tuple[Path, ModelSpec]:
    """Qwen2's upper layers see a window; the other model's layers take turns, as gpt-oss's do."""
    more = {"num_hidden_layers": 4, "head_dim": 16, "hidden_size": 20, "num_attention_heads": 4}
    if name == "upper layers":
        fields = {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2}
        made = make_checkpoint(Case("upper", "qwen2", {**SMALL, **more, **fields}), folder)
        return made, spec_from_config(open_checkpoint(made).config)
    made = make_checkpoint(Case("turns", "llama", {**SMALL, **more}), folder)
    spec = spec_from_config(open_checkpoint(made).config)
    return made, replace(spec, windows=(33, None) * 2)


@on_machines("name", ["upper layers", "every other layer"], hip=(1,), fixture="gpu")
def test_layers_of_several_kinds(tmp_path: Path, gpu: str, name: str) -> None:
    folder, spec = windows_of(name, tmp_path / "model")
    plan = gpu_plan(spec, 5, CONTEXT, tuning=Tuning(units_per_split=1), backend=gpu)
    kinds = plan.ranks[0].layer_kinds
    assert kinds == ((0, 0, 1, 1) if name == "upper layers" else (0, 1, 0, 1))
    exact = reference_logits(folder, spec, TOKENS)
    blind = reference_logits(folder, replace(spec, windows=(None,) * 4), TOKENS)
    with on_host(folder, spec, plan) as backend:
        rows = backend.logits(TOKENS, backend.new_sequence())
        HostKernel.schedule = SCHEDULES[1]
        sequence = backend.new_sequence()
        backend.logits(TOKENS[:90], sequence)
        tokens = backend.logits(TOKENS[90:], sequence, chunk=0)
    assert distance(rows, exact) < TOLERANCE
    assert distance(tokens, exact[90:]) < TOLERANCE
    assert distance(rows, blind) > 2 * TOLERANCE  # the windows make a difference


@on_machines(fixture="gpu")
def test_a_layer_of_five_matrices(tmp_path: Path, gpu: str) -> None:
    """A third module, a matrix with a norm of its own: an entry in the spec's table, and nothing else."""
    import torch

    tokens_in = TOKENS[:40] if gpu == "cuda" else TOKENS[:9]
    folder = make_checkpoint(Case("five", "llama", NARROW), tmp_path / "five")
    four = spec_from_config(open_checkpoint(folder).config)
    without, path = reference_logits(folder, four, tokens_in), folder / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(5)
    for layer in range(SMALL["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.mix.weight"] = torch.randn(20, 20, generator=generator) / 4
        tensors[f"model.layers.{layer}.mix_norm.weight"] = torch.rand(20, generator=generator) + 0.5
    save_file(tensors, path, {"format": "pt"})
    mix = Matrix("mix", ("mix",), "residual", "residual", gain="mix_norm")
    sources = {role: TensorSource(f"{LAYER}{role}.weight") for role in ("mix", "mix_norm")}
    spec = replace(four, layer=(*four.layer, mix), layer_tensors=four.layer_tensors | sources)
    plan = gpu_plan(spec, 5, CONTEXT, tuning=Tuning(units_per_split=1), backend=gpu)
    exact = reference_logits(folder, spec, tokens_in)
    with on_host(folder, spec, plan) as backend:
        rows = logits_of(backend, tokens_in, None)
        tokens = logits_of(backend, tokens_in, 0)
    for seen in (rows, tokens):
        assert distance(seen[0], exact) < TOLERANCE
        assert distance(seen[0], without) > 2 * TOLERANCE
        assert np.array_equal(*seen)
    with pytest.raises(
        UnsupportedModel,
        match="The CPU backend runs layers of four matrices, or of experts; those of llama are others",
    ):
        load_backend("cpu", spec, open_checkpoint(folder), context=CONTEXT)


@on_machines(fixture="gpu")
def test_weights_whose_address_is_published_at_run_time(tmp_path: Path, gpu: str) -> None:
    """Hash routing: the token decides which of two `down` matrices the last layer takes.

    The two models differ in nothing else, so a token's logits are those of the model that its id chooses: what the last
    layer adds to the residual is seen by no other token.
    """
    case = Case("published", "llama", {**NARROW, "tie_word_embeddings": False})
    folders = [make_checkpoint(case, tmp_path / name) for name in ("even", "odd")]
    path = folders[1] / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"] *= -0.7
    save_file(tensors, path, {"format": "pt"})
    spec = spec_from_config(open_checkpoint(folders[0]).config)
    plan = gpu_plan(spec, 3, CONTEXT, tuning=Tuning(published=("down",)), backend=gpu)
    tokens = TOKENS[:14]
    exact = [reference_logits(folder, spec, tokens) for folder in folders]
    with (
        on_host(folders[0], spec, plan) as even,
        on_host(folders[1], spec, plan) as odd,
    ):
        tapes = [backend.memories_of(["tapes"])["tapes"] for backend in (even, odd)]
        both = [tape.read(np.empty(tape.bytes, np.uint8)) for tape in tapes]
        library = DeviceMemory.of(np.concatenate(both))
        even._params.tapes, even._params.choice_stride = library.pointer, tapes[0].bytes
        seen = logits_of(even, tokens, 0)
    wanted = np.stack([exact[token % 2][place] for place, token in enumerate(tokens)])
    assert {token % 2 for token in tokens} == {0, 1}
    assert distance(seen[0], wanted) < TOLERANCE
    assert distance(seen[0], exact[0]) > 2 * TOLERANCE
    assert np.array_equal(*seen)
