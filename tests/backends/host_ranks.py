"""Small models on several ranks of the kernel that runs on the host, for all tests of ranks without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.host_kernel import Schedule, host_gpu
from families import Case, make_checkpoint
from lane_models import in_modules, make_laneformer
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.compiler.gpu import Tuning, gpu_plan
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
    "eight": Case(
        "ranks-eight", "llama",
        {**SMALL, "hidden_size": 40, "head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    #: So wide that all workers have a part of every sum over rows.
    "wide": Case(
        "ranks-wide", "llama", {**SMALL, "hidden_size": 264, "head_dim": 16, "num_attention_heads": 4}
    ),
    #: Products of so many values that workers share them by k.
    "long": Case(
        "ranks-long", "llama",
        {**SMALL, "hidden_size": 24, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 1088},
    ),
    "odd width": Case(
        "ranks-odd", "llama",
        {**SMALL, "hidden_size": 22, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
    ),
}  # fmt: skip
#: Ways in which lanes share what they compute, and their workers.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "delay 2": ({"num_hidden_layers": 3}, 2),
    "delay 2, four lanes": ({"num_lanes": 4, "num_hidden_layers": 3}, 1),
    "delay 1, feed-forward alone, head by vocabulary": (
        {"use_attention_comm": False, "lm_head_type": "vocab_parallel", **in_modules(1)}, 3,
    ),
    "early sums, norms of their own": (
        {"use_early_comm": True, "replicated_rmsn_scale": False, "num_hidden_layers": 3}, 2,
    ),
    "ladder of three, summed head": (
        {"ladder_residual": True, "pre_norm_lane_agg": True, **in_modules(3)}, 2,
    ),
    "silent": ({"use_comm": False}, 2),
}  # fmt: skip
#: The same with many ranks, for tests that are quick.
MANY_RANKS: dict[str, tuple[dict[str, Any], int]] = {
    "delay 4, eight lanes": (
        {
            "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "num_lanes": 8,
            "broadcast_delay": 2, "num_hidden_layers": 3,
        }, 1,
    ),
}  # fmt: skip
SCHEDULES = (
    Schedule(seed=2, delay_steps=20_000, copy_steps=20_000, favour_steps=60_000),
    Schedule(seed=3, stalls_per_million=40, stall_steps=100_000, delay_steps=3000, favour_steps=200_000),
)
TOKENS = tuple(np.random.default_rng(5).integers(3, VOCAB, 140).tolist())
TOLERANCE = 0.04  # of the logits' norm: activations are rounded to bf16 between stages
DEADLINE_NS = 100_000_000  # of the machine's own time
Load = Callable[..., RankedCudaBackend]


def checkpoints(factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them by name, made once."""
    folder = factory.getbasetemp() / "host-ranks"
    if not folder.exists():
        for name, case in PLAIN.items():
            make_checkpoint(case, folder / name)
        for name, (changes, _) in (SETTINGS | MANY_RANKS).items():
            make_laneformer(folder / name, **{**LANES, **changes})
    return folder


@contextmanager
def loader(place: Path, gpu: str = "cuda") -> Iterator[Load]:
    """Within, loads a checkpoint of that folder onto a GPU of its own."""
    with ExitStack() as stack:

        def load(
            name: str, workers: int, tp: int | None = None, *, link_delay: bool = False, fewer_slots: int = 0,
            context: int = CONTEXT,
        ) -> RankedCudaBackend:  # fmt: skip
            stack.enter_context(host_gpu())
            checkpoint = open_checkpoint(place / name)
            spec = spec_from_config(checkpoint.config)
            tuning = Tuning(link_delay=link_delay)
            plan = gpu_plan(spec, workers, context, tp=tp, tuning=tuning, backend=gpu)
            ranks = [
                replace(rank, links=replace(rank.links, slots=rank.links.slots - fewer_slots))
                for rank in plan.ranks
            ]
            plan = replace(plan, ranks=tuple(ranks))
            loaded = RankedCudaBackend.load(spec, plan, checkpoint, devices=[0] * len(plan.ranks))
            for rank in loaded.ranks:
                rank._params.deadline_ns = DEADLINE_NS
            stack.callback(loaded.close)
            return loaded

        yield load
