"""Experts in the CUDA kernel, on the host's machine: the numbers of the reference, in every order of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from backends.cpu_cases import distance
from backends.host_kernel import HostKernel, MachineFault, Schedule, host_gpu
from backends.host_setups import CONTEXT, DEADLINE_NS, Logits, on_machines
from backends.source_edits import Line, put
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.backends.reference.backend import ReferenceBackend
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.engine.asked import Asked, formats_for
from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.gpu import GpuPlan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.open import open_checkpoint

VOCAB = 59
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 36, "head_dim": 16, "vocab_size": VOCAB, "num_attention_heads": 4,
}  # fmt: skip
CASES = {
    "gpt-oss": Case(
        "gpt-oss", "gpt_oss",
        {
            **SMALL, "intermediate_size": 44, "num_local_experts": 11, "num_experts_per_tok": 4, "sliding_window": 7,
        },
    ),
    "qwen3-moe": Case(
        "qwen3-moe", "qwen3_moe",
        {
            **SMALL, "moe_intermediate_size": 28, "num_experts": 13, "num_experts_per_tok": 5,
            "norm_topk_prob": True,
        },
    ),
    "plain softmax": Case(
        "plain softmax", "qwen3_moe",
        {**SMALL, "moe_intermediate_size": 31, "num_experts": 7, "num_experts_per_tok": 3},
    ),
    "mixtral": Case(
        "mixtral", "mixtral",
        {**SMALL, "intermediate_size": 44, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    # One expert alone, whose weight is not 1: it is taken from a softmax over all.
    "single": Case(
        "single", "qwen3_moe",
        {**SMALL, "hidden_size": 150, "moe_intermediate_size": 100, "num_experts": 4, "num_experts_per_tok": 1},
    ),
    # Tiles of `down` take two pages, and a worker has more than a batch of them.
    "broad": Case(
        "broad", "mixtral",
        {
            **SMALL, "hidden_size": 300, "intermediate_size": 1100, "num_local_experts": 3,
            "num_experts_per_tok": 2,
        },
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(11).integers(3, VOCAB, 70).tolist()
SCHEDULES = (Schedule(1), Schedule(2, stalls_per_million=1000, stall_steps=100_000, delay_steps=2000))
TOLERANCE = 0.04
COUNT = {"cuda": 30, "hip": 5}  # tokens; waves of 64 lanes take the host twice as long


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    return {name: make_checkpoint(case, root / name, "bfloat16") for name, case in CASES.items()}


@contextmanager
def on_host(folder: Path, spec: ModelSpec, plan: GpuPlan, source: Checkpoint) -> Iterator[CudaBackend]:
    with host_gpu():
        backend = CudaBackend.load(spec, plan, source)
        backend._params.deadline_ns = DEADLINE_NS
        try:
            yield backend
        finally:
            backend.close()


def opened(folder: Path) -> tuple[ModelSpec, Checkpoint]:
    checkpoint = open_checkpoint(folder)
    return spec_from_config(checkpoint.config), checkpoint


def reference_logits(spec: ModelSpec, source: Checkpoint, tokens: Sequence[int]) -> Logits:
    backend = load_backend("reference", spec, source, dtype="f32", context=CONTEXT)
    assert isinstance(backend, ReferenceBackend)
    return backend.logits(tokens, backend.new_sequence())


def middle(got: Logits, exact: Logits) -> float:
    """Of the rows the middle one: where two experts nearly tie, any precision may take either."""
    return float(np.median([distance(*rows) for rows in zip(got, exact, strict=True)]))


def rows_and_tokens(backend: CudaBackend, tokens: Sequence[int]) -> tuple[Logits, Logits]:
    """The logits of a prompt in rows, and token by token: the same in every order of events."""
    found = []
    for chunk in (None, 0):
        seen = []
        for schedule in SCHEDULES:
            HostKernel.schedule = schedule
            seen.append(backend.logits(tokens, backend.new_sequence(), chunk))
        assert np.array_equal(*seen)
        found.append(seen[0])
    return found[0], found[1]


def agrees(folder: Path, workers: int, count: int, gpu: str) -> tuple[Logits, Logits]:
    spec, source = opened(folder)
    plan = gpu_plan(spec, workers, CONTEXT, tuning=Tuning(units_per_split=1), backend=gpu)
    exact = reference_logits(spec, source, TOKENS[:count])
    with on_host(folder, spec, plan, source) as backend:
        rows, tokens = rows_and_tokens(backend, TOKENS[:count])
    assert middle(rows, exact) < TOLERANCE
    assert middle(tokens, exact) < TOLERANCE
    return rows, exact


@on_machines(fixture="gpu")
def test_sinks_biases_windows_and_a_clamped_gate(folders: dict[str, Path], gpu: str) -> None:
    agrees(folders["gpt-oss"], 5, COUNT[gpu], gpu)


@pytest.mark.long
@on_machines(
    "name, workers",
    [
        ("gpt-oss", 20), ("qwen3-moe", 5), ("single", 2), ("single", 5),
        ("qwen3-moe", 2), ("plain softmax", 20), ("mixtral", 2), ("broad", 2),
        ("broad", 5),
    ],
    hip=(7,), fixture="gpu",
)  # fmt: skip
def test_the_numbers_of_the_reference(folders: dict[str, Path], gpu: str, name: str, workers: int) -> None:
    """With 20 workers some have no tiles of experts, or of the second stage alone."""
    agrees(folders[name], workers, 70 if workers == 5 and name != "broad" else min(20, COUNT[gpu]), gpu)


def change_routers(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("block_sparse_moe.gate.weight", "mlp.gate.weight")):
            if change == "all alike":
                tensor[:] = 0
            else:
                tensor[1::2] = tensor[0:-1:2]
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.long
@on_machines(
    "name, change", [("mixtral", "all alike"), ("qwen3-moe", "pairs alike")], hip=(1,), fixture="gpu"
)
def test_ties_go_to_the_lower_expert(tmp_path: Path, gpu: str, name: str, change: str) -> None:
    """With all logits equal every row chooses the same experts: the longest lists that there can be."""
    folder = make_checkpoint(CASES[name], tmp_path / name, "bfloat16")
    before = reference_logits(*opened(folder), TOKENS[: COUNT[gpu]])
    change_routers(folder, change)
    rows, exact = agrees(folder, 5, COUNT[gpu], gpu)
    assert distance(rows, exact) < TOLERANCE or change != "all alike"  # nothing nearly ties: every row agrees
    assert distance(before, exact) > 2 * TOLERANCE


def rounded(folder: Path, gpu: str, dtype: str) -> tuple[ModelSpec, GpuPlan, Checkpoint]:
    spec, checkpoint = opened(folder)
    source, formats = formats_for(gpu, Asked(dtype, "auto", "auto"), spec, checkpoint)
    assert formats.default is Format.BF16 and "router" not in formats.of_stages
    plan = gpu_plan(spec, 3, CONTEXT, formats.default, stage_formats=formats.of_stages, backend=gpu)
    assert not plan.ranks[0].products_of_stages[-2].format.is_half
    return spec, plan, source


@pytest.mark.long
@on_machines(
    "name, dtype",
    [
        pytest.param(
            "qwen3-moe", "int4", marks=pytest.mark.wide
        ),  # "broad" has more groups a row, and hip has this one
        ("broad", "int4"),
        pytest.param("broad", "fp8", marks=pytest.mark.wide),  # experts in FP8 have the sums of those in q8
        ("qwen3-moe", "q8"),
    ],
    hip=(0,),
    fixture="gpu",
)
def test_rounded_experts(folders: dict[str, Path], gpu: str, name: str, dtype: str) -> None:
    """Scales of rows, of groups along k, and integer products: experts with all of them are added up."""
    spec, plan, source = rounded(folders[name], gpu, dtype)
    exact = reference_logits(spec, source, TOKENS[: COUNT[gpu]])
    with on_host(folders[name], spec, plan, source) as backend:
        rows, tokens = rows_and_tokens(backend, TOKENS[: COUNT[gpu]])
    assert middle(rows, exact) < TOLERANCE
    assert middle(tokens, exact) < TOLERANCE


NO_WAIT = Line("token/experts.h", "  wait_copy_groups<0>();\n  return c.meet();\n", "  return true;\n")


@pytest.mark.long
@on_machines(hip=(), fixture="gpu")
def test_without_the_wait_scales_of_experts_are_late(
    folders: dict[str, Path], gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come while gate_up is computed. Each thread waits for those that it fetched, and for all other threads."""
    spec, plan, source = rounded(folders["qwen3-moe"], gpu, "int4")
    put(NO_WAIT, tmp_path, monkeypatch)
    with (
        on_host(folders["qwen3-moe"], spec, plan, source) as backend,
        pytest.raises(MachineFault, match="A thread ended before its copies"),
    ):
        backend.logits(TOKENS[:3], backend.new_sequence(), 0)


@pytest.mark.long
@on_machines(fixture="gpu")
def test_experts_as_gpt_oss_stores_them(tmp_path: Path, gpu: str) -> None:
    from weights.expert_files import to_mxfp4  # needs gguf; tests on a GPU import this file and do without

    case = Case("stored", "gpt_oss", {**CASES["gpt-oss"].fields, "hidden_size": 96, "intermediate_size": 160})
    folder = to_mxfp4(make_checkpoint(case, tmp_path / "stored"))
    spec, checkpoint = opened(folder)
    source, formats = formats_for(gpu, Asked("auto", "auto", "auto"), spec, checkpoint)
    assert formats.of_stages == dict.fromkeys(("gate_up", "down"), Format.MXFP4)
    plan = gpu_plan(spec, 5, CONTEXT, formats.default, stage_formats=formats.of_stages, backend=gpu)
    exact = reference_logits(spec, source, TOKENS[: COUNT[gpu]])
    with on_host(folder, spec, plan, source) as backend:
        rows, tokens = rows_and_tokens(backend, TOKENS[: COUNT[gpu]])
    assert middle(rows, exact) < TOLERANCE
    assert middle(tokens, exact) < TOLERANCE


@pytest.mark.long
@on_machines("name", ["gpt-oss", "mixtral"], fixture="gpu")
def test_ranks_share_the_columns_of_experts(tmp_path: Path, gpu: str, name: str) -> None:
    case = Case(name, CASES[name].family, {**CASES[name].fields, "intermediate_size": 64, "vocab_size": 64})
    folder = make_checkpoint(case, tmp_path / name, "bfloat16")
    spec, source = opened(folder)
    plan = gpu_plan(spec, 3, 96, tp=2, backend=gpu)
    exact = reference_logits(spec, source, TOKENS[: COUNT[gpu]])
    with host_gpu():
        backend = RankedCudaBackend.load(spec, plan, source, devices=[0, 0])
        for rank in backend.ranks:
            rank._params.deadline_ns = DEADLINE_NS
        rows = backend.logits(TOKENS[: COUNT[gpu]], backend.new_sequence())
        tokens = backend.logits(TOKENS[: COUNT[gpu]], backend.new_sequence(), 0)
        backend.close()
    assert middle(rows, exact) < TOLERANCE
    assert middle(tokens, exact) < TOLERANCE
