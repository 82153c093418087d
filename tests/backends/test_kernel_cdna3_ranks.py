"""Ranks of the monokernel with CDNA3's waves and memory, on the host's machine.

Launches run on dies of their own, whose L2s are not coherent, and talk through their inboxes alone. The HIP backend
does not run ranks yet; their kernel is ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import distance, reference
from backends.host_kernel import HostKernel
from backends.host_ranks import CONTEXT, SCHEDULES, SETTINGS, TOKENS, TOLERANCE, Load, checkpoints, loader

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path) -> Iterator[Load]:
    with loader(place, "hip") as load:
        yield load


@pytest.mark.parametrize(
    ("name", "workers", "tp"), [("llama", 2, 2), ("delay 2", SETTINGS["delay 2"][1], None)]
)
def test_rows_and_tokens_in_any_order(
    load: Load, place: Path, name: str, workers: int, tp: int | None
) -> None:
    backend, want, seen = load(name, workers, tp), reference(place / name, CONTEXT, tp=tp), []
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        sequence = backend.new_sequence()
        parts = [backend.logits(TOKENS[:37], sequence), backend.logits(TOKENS[37:40], sequence, chunk=0)]
        seen.append(np.concatenate(parts))
    assert distance(seen[0], want.logits(TOKENS[:40], want.new_sequence())) < TOLERANCE
    assert np.array_equal(*seen)
