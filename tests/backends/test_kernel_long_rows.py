"""Attention of a prefill over more positions than shared memory has steps for, with heads of all sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import distance, reference
from backends.host_kernel import HostKernel
from backends.host_setups import SMALL, TOLERANCE, Logits
from backends.test_kernel_last_layer import Line, put
from backends.test_kernel_on_host import SCHEDULES
from backends.test_kernel_seams import on_host
from families import Case, make_checkpoint
from monotape.compiler.gpu import gpu_plan
from monotape.errors import NumericalFault
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

pytestmark = pytest.mark.slow

LONGEST = 900
TOKENS = tuple(np.random.default_rng(3).integers(3, SMALL["vocab_size"], LONGEST).tolist())
#: The ends of turns, by the values of a head. Of 64 values a step may look at 128 positions, and six steps fit.
TURNS = {64: (850, 900), 80: (310, 370), 128: (400, 460)}
MEET, PLACE, COPY = (
    "      consumers_meet(kConsumers);\n      // All warps awaited the products of the step before this barrier.\n",
    """\
      const int next = unit + (kSteps - 1) * kUnits, slot = (step + kSteps - 1) % kSteps;
      if constexpr (kNarrowKv) {
        const Codes codes = fetched_units(next, end);  // arrives while this step is multiplied
        if (unit * kUnitPositions <= any_sees_until_) look_at_units(unit * kUnitPositions, step % kSteps);
        put_units(codes, next, end, slot);
      } else {
""",
    "        copy_units(next, end, slot);\n",
)
EARLY_COPY = Line("rows/attention.h", MEET + PLACE + COPY, PLACE + COPY + MEET)


def in_orders(folder: Path, head: int, gpu: str) -> tuple[list[Logits], Logits]:
    """The logits of TURNS in several orders of events, and those of the reference."""
    fields = {
        **SMALL, "num_hidden_layers": 1, "hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": head, "max_position_embeddings": LONGEST,
    }  # fmt: skip
    model, ends = folder / f"heads of {head}", TURNS[head]
    make_checkpoint(Case(model.name, "llama", fields), model)
    spec = spec_from_config(open_checkpoint(model).config)
    want = reference(model, LONGEST)
    exact = want.logits(TOKENS[: ends[-1]], want.new_sequence())
    seen = []
    with on_host(model, spec, gpu_plan(spec, 2, LONGEST, backend=gpu)) as backend:
        for schedule in SCHEDULES[:2]:
            HostKernel.schedule = schedule
            sequence = backend.new_sequence()
            turns = zip((0, *ends), ends, strict=False)
            seen.append(np.concatenate([backend.logits(TOKENS[a:b], sequence) for a, b in turns]))
    return seen, exact


@pytest.mark.parametrize(
    ("gpu", "head"),
    [("cuda", 128), *(pytest.param("cuda", head, marks=pytest.mark.long) for head in (64, 80)),
     pytest.param("hip", 80, marks=pytest.mark.long)],
)  # fmt: skip
def test_steps_take_the_place_of_earlier_ones(tmp_path: Path, gpu: str, head: int) -> None:
    seen, exact = in_orders(tmp_path, head, gpu)
    assert distance(seen[0], exact) < TOLERANCE
    assert np.array_equal(*seen)


@pytest.mark.long
def test_a_copy_that_does_not_wait_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(EARLY_COPY, tmp_path, monkeypatch)
    try:
        seen, exact = in_orders(tmp_path, 128, "cuda")
    except NumericalFault:
        return
    assert distance(seen[0], exact) >= TOLERANCE or not np.array_equal(*seen)
