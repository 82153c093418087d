"""Small models on the host's machine: which ones, on how many workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.host_kernel import host_gpu
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.open import open_checkpoint

CONTEXT = 160
VOCAB = 59
SMALL = {"num_hidden_layers": 2, "intermediate_size": 44, "vocab_size": VOCAB}
CASES = {
    # Three tiles of width among five workers: two of them have nothing of some stages.
    "narrow": Case("narrow", "llama", {**SMALL, "hidden_size": 20, "head_dim": 16, "num_attention_heads": 4}),
    "odd": Case("odd", "qwen3", {**SMALL, "hidden_size": 54, "head_dim": 48, "tie_word_embeddings": True}),
    # With three workers and more than 64 rows, each product of a layer is cut into blocks of another shape.
    "broad": Case("broad", "qwen2", {**SMALL, "hidden_size": 54, "head_dim": 48, "intermediate_size": 300}),
}
CASES["deep"] = replace(CASES["narrow"], fields={**CASES["narrow"].fields, "num_hidden_layers": 3})
# With pages of 16 blocks a tile of `down` takes three pages, and others share one; the head has more than one batch.
CASES["long"] = replace(
    CASES["narrow"], fields={**CASES["narrow"].fields, "intermediate_size": 1300, "vocab_size": 300}
)
# Three units of KV in a page of 96 blocks, and four pages in the ring.
CASES["large head"] = replace(
    CASES["narrow"],
    fields={**CASES["narrow"].fields, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
)
# Of several rows, the input of `down` is too long for shared memory: 70 blocks, or 68 and a word.
for name, size in (("direct", 2240), ("odd direct", 2180)):
    CASES[name] = replace(CASES["narrow"], fields={**CASES["narrow"].fields, "intermediate_size": size})
# More tokens than a worker of AMD's has threads.
CASES["words"] = replace(CASES["narrow"], fields={**CASES["narrow"].fields, "vocab_size": 600})
# What rows leave in memory is of this layer alone.
CASES["one layer"] = replace(CASES["broad"], fields={**CASES["broad"].fields, "num_hidden_layers": 1})
# More tokens of each of two workers than one look of its threads at a mask covers: 32 a thread.
CASES["many masks"] = replace(CASES["narrow"], fields={**CASES["narrow"].fields, "vocab_size": 16_700})
# Four query heads share one KV head.
CASES["one head"] = replace(CASES["narrow"], fields={**CASES["narrow"].fields, "num_key_value_heads": 1})
# All layers see the last 70 positions: three units or four. From position 101 on a token does not see the first one.
CASES["window"] = Case("window", "mistral", {**CASES["narrow"].fields, "sliding_window": 70})
# gpt-oss in small: biases of experts, a clamped gate, sinks and windows.
CASES["experts"] = Case(
    "experts", "gpt_oss",
    {
        **SMALL, "hidden_size": 36, "head_dim": 16, "num_attention_heads": 4, "num_local_experts": 7,
        "num_experts_per_tok": 3, "sliding_window": 9,
    },
)  # fmt: skip
SETUPS = {  # the case, its workers, and how many units of KV are enough for a split of attention
    "two workers": ("narrow", 2, 8),
    "odd heads": ("odd", 3, 8),
    "splits": ("narrow", 5, 1),
    "shapes": ("broad", 3, 8),
    # Most own tiles of one stage only, and can be far ahead of the others.
    "many workers": ("deep", 20, 8),
    # Two have no part of `output` and `down`, as 20 of an H200's workers with a model that is 896 wide.
    "two left out": ("deep", 5, 8),
    "many splits": ("deep", 12, 1),  # up to five of a KV head, and room for a sixth
    "long tiles": ("long", 2, 8),
    "large head": ("large head", 2, 16),
    "direct": ("direct", 2, 8),
    "odd direct": ("odd direct", 3, 8),
    "many words": ("words", 2, 8),
    "many masks": ("many masks", 2, 8),
    # Three workers share a KV head, and one of them combines the parts of two of its query heads.
    "fewer workers than heads": ("one head", 3, 1),
    # 30 tiles of q, k and v each: more than a batch.
    "two batches": ("broad", 2, 8),
    "one layer": ("one layer", 3, 8),
    "window": ("window", 2, 8),
    "window in splits": ("window", 5, 1),
    "experts": ("experts", 5, 8),
    # Of some workers the only tiles are those of one expert's matrix.
    "experts far apart": ("experts", 20, 8),
}
TOLERANCE = 0.04  # of the logits' norm: activations are rounded to bf16 between stages
DEADLINE_NS = 100_000_000  # of the machine's own time; Patience speaks up long before
Logits = NDArray[np.float32]
Load = Callable[..., CudaBackend]  # a setup, and what is to be different from it


def checkpoints(factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each of CASES: the same for all files, because making them takes a second."""
    folder = factory.getbasetemp() / "host-setups"
    if not folder.exists():
        for name, case in CASES.items():
            make_checkpoint(case, folder / name)
    return folder


def on_machines(
    names: str = "", cases: Sequence[Any] = ((),), *, hip: Sequence[int] = (0,), fixture: str = "load",
    amd: Sequence[pytest.MarkDecorator] = (pytest.mark.long, pytest.mark.wide),
) -> pytest.MarkDecorator:  # fmt: skip
    """Every case with NVIDIA's fragments, warps and ring; those numbered in `hip` also with AMD's fragments, waves,
    dies and no ring, and with the marks `amd`. The machine goes to the fixture `load`, or to the argument of another
    name."""
    argnames = (fixture, *(name.strip() for name in names.split(",") if name.strip()))

    def values(case: Any) -> tuple[Any, ...]:
        given = case.values if hasattr(case, "marks") else case  # of a pytest.param
        return given if isinstance(given, tuple) and len(given) == len(argnames) - 1 else (given,)

    both = [pytest.param("cuda", *values(case), marks=getattr(case, "marks", ())) for case in cases]
    both += [pytest.param("hip", *values(cases[number]), marks=amd) for number in hip]
    return pytest.mark.parametrize(argnames, both, indirect=[fixture] if fixture == "load" else False)


@contextmanager
def loading_from(place: Path, gpu: str = "cuda") -> Iterator[Load]:
    """Within, a setup is loaded onto a GPU of its own."""
    with ExitStack() as stack:

        def load(
            setup: str, page_blocks: int | None = None, rows: int = 1, context: int = CONTEXT,
            units: int | None = None, kv: Format | None = None, fmt: Format = Format.BF16,
        ) -> CudaBackend:  # fmt: skip
            case, workers, enough = SETUPS[setup]
            stack.enter_context(host_gpu())
            checkpoint = open_checkpoint(place / case)
            spec = spec_from_config(checkpoint.config)
            tuning = Tuning(units_per_split=units or enough, page_blocks=page_blocks, rows=rows)
            plan = gpu_plan(spec, workers, context, fmt, tuning=tuning, backend=gpu, kv_format=kv)
            loaded = CudaBackend.load(spec, plan, checkpoint)
            loaded._params.deadline_ns = DEADLINE_NS
            stack.callback(loaded.close)
            return loaded

        yield load
