"""Ranks of the monokernel without a GPU: launches that run at the same time and talk through their inboxes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import ids, reference
from backends.host_kernel import HostKernel, Schedule, host_gpu
from families import Case, make_checkpoint
from lane_models import in_modules, make_laneformer
from monotape.backends.cuda import backend as cuda_backend
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.links import Numbers
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.backends.protocol import Job, Sampling
from monotape.backends.reference.sampler import choose, logprobs
from monotape.compiler.compile import compile_plan
from monotape.engine.loading import gpu_plan
from monotape.errors import DeadlineFault, NumericalFault, UnsupportedModel
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

CONTEXT = 96
VOCAB = 64
SMALL = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": VOCAB}
LANES = {
    **SMALL, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_lanes": 2,
    "sliding_window": 5, "swa_layers": [1],
}  # fmt: skip
#: A width of three tiles, so that some of four workers own nothing of some stages.
PLAIN = {
    "llama": Case("ranks-llama", "llama", {**SMALL, "hidden_size": 20, "head_dim": 16, "num_attention_heads": 4}),
    "qwen2": Case(
        "ranks-qwen2", "qwen2", {**SMALL, "hidden_size": 64, "num_attention_heads": 4, "tie_word_embeddings": True}
    ),
}  # fmt: skip
#: Ways in which lanes share what they compute, and their workers.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "tensor parallel": ({"broadcast_delay": 0}, 2),
    "delay 1": (in_modules(1), 3),
    "delay 2": ({"num_hidden_layers": 3}, 2),
    "delay 2, four lanes": ({"num_lanes": 4, "num_hidden_layers": 3}, 1),
    "early sums": ({"use_early_comm": True, "num_hidden_layers": 3}, 2),
    "ladder": ({**in_modules(1), "ladder_residual": True}, 2),
    "ladder of three": ({**in_modules(3), "ladder_residual": True}, 2),
    "silent": ({"use_comm": False}, 2),
    "attention alone": ({"use_mlp_comm": False}, 2),
    "summed head": ({"pre_norm_lane_agg": True}, 2),
    "norms of their own": ({"replicated_rmsn_scale": False}, 2),
    "head by vocabulary": ({"lm_head_type": "vocab_parallel"}, 2),
}
SCHEDULES = (
    Schedule(seed=1),
    Schedule(seed=2, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
    Schedule(seed=3, stalls_per_million=40, stall_steps=100_000, delay_steps=3000, favour_steps=200_000),
)
TOKENS = tuple(np.random.default_rng(5).integers(3, VOCAB, 40).tolist())
TOLERANCE = 0.04  # of the logits' norm: activations are rounded to bf16 between stages
DEADLINE_NS = 100_000_000  # of the machine's own time
Logits = NDArray[np.float32]
Load = Callable[..., RankedCudaBackend]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host-ranks")
    for name, case in PLAIN.items():
        make_checkpoint(case, folder / name)
    for name, (changes, _) in SETTINGS.items():
        make_laneformer(folder / name, **{**LANES, **changes})
    return folder


@pytest.fixture
def load(place: Path) -> Iterator[Load]:
    with ExitStack() as stack:

        def backend(
            name: str, workers: int, tp: int | None = None, *, link_delay: bool = False, fewer_slots: int = 0
        ) -> RankedCudaBackend:
            stack.enter_context(host_gpu(place / "libraries"))
            checkpoint = open_checkpoint(place / name)
            spec = spec_from_config(checkpoint.config)
            plan = gpu_plan(spec, workers, CONTEXT, tp=tp)
            plan = replace(plan, slots=plan.slots - fewer_slots)
            devices = [0] * len(plan.ranks)
            loaded = RankedCudaBackend.load(spec, plan, checkpoint, devices=devices, link_delay=link_delay)
            for rank in loaded.ranks:
                rank._params.deadline_ns = DEADLINE_NS
            stack.callback(loaded.close)
            return loaded

        yield backend


def distance(got: Logits, want: Logits) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def agrees(backend: RankedCudaBackend, exact: Logits, count: int) -> None:
    """Close to the reference, and the same bits whatever order the machine chose."""
    seen = []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        seen.append(backend.logits(TOKENS[:count], backend.new_sequence()))
    assert distance(seen[0], exact) < TOLERANCE
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize(("name", "ranks", "workers"), [("llama", 2, 2), ("qwen2", 2, 3), ("qwen2", 4, 1)])
def test_tensor_parallelism_in_any_order(
    load: Load, place: Path, name: str, ranks: int, workers: int
) -> None:
    want = reference(place / name, CONTEXT, tp=ranks)
    exact = want.logits(TOKENS[:7], want.new_sequence())
    agrees(load(name, workers, ranks), exact, 7)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_way_to_share_in_any_order(load: Load, place: Path, name: str) -> None:
    want = reference(place / name, CONTEXT)
    exact = want.logits(TOKENS[:5], want.new_sequence())
    agrees(load(name, SETTINGS[name][1]), exact, 5)
