"""KV in 8 bits on the host's machine: it stores what the reference keeps, and every way of reading it agrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backends.cpu_cases import distance, reference
from backends.host_drafts import answer, plain, predicting
from backends.host_kernel import HostKernel, Schedule
from backends.host_setups import CONTEXT, SETUPS, TOLERANCE, VOCAB, Load, checkpoints, loading_from
from backends.narrow_kv import continued, stored
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.protocol import Job
from monotape.errors import NumericalFault
from monotape.plan.formats import Format
from monotape.plan.gpu import UNIT_POSITIONS
from monotape.weights.rounding import fp8_heads

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_soon")]

TOKENS = tuple(np.random.default_rng(5).integers(3, VOCAB, 80).tolist())
SCHEDULES = (
    Schedule(seed=1),
    Schedule(seed=2, stalls_per_million=40, stall_steps=100_000, delay_steps=3000, favour_steps=200_000),
)
FAR = {Format.BF16: TOLERANCE, Format.F16: TOLERANCE / 4}  # of the logits' norm
IN_F16 = ("two workers",)  # of the setups; wide tests show the other format with the others too


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path) -> Iterator[Load]:
    with loading_from(place) as load:
        yield load


def in_formats(*cases: tuple[Any, ...]) -> list[Any]:
    """Every case, whose first value is its setup, in bf16 and in fp16."""
    shown = [(case, fmt) for case in cases for fmt in FAR]
    wide = [fmt is Format.F16 and case[0] not in IN_F16 for case, fmt in shown]
    return [
        pytest.param(*case, fmt, marks=[pytest.mark.wide] if more else [])
        for (case, fmt), more in zip(shown, wide, strict=True)
    ]


def scaled(place: Path, case: str, key: float, value: float) -> str:
    """The checkpoint with other magnitudes of keys and values, head by head; its name."""
    name = f"{case} x {key:g} {value:g}"
    if not (place / name).exists():
        (place / name).mkdir()
        for file in (place / case).iterdir():
            if file.suffix != ".safetensors":
                (place / name / file.name).write_bytes(file.read_bytes())
        tensors = load_file(place / case / "model.safetensors")
        for tensor in tensors:
            factor = key if ".k_proj." in tensor else value if ".v_proj." in tensor else None
            if factor is not None:
                tensors[tensor] = (tensors[tensor].astype(np.float32) * factor).astype(tensors[tensor].dtype)
        save_file(tensors, place / name / "model.safetensors")
    return name


@pytest.mark.parametrize("chunk", [None, 0], ids=["rows", "token by token"])
@pytest.mark.parametrize(
    ("setup", "key", "value", "fmt"),
    in_formats(
        ("two workers", 1.0, 1.0),
        ("odd heads", 1.0, 1.0),
        ("large head", 40.0, 1e-4),
        ("two workers", 1e-7, 200.0),
    ),
)
def test_the_first_layer_is_stored_as_the_reference_rounds_it(
    load: Load, place: Path, monkeypatch: pytest.MonkeyPatch, fmt: Format, chunk: int | None, setup: str,
    key: float, value: float,
) -> None:  # fmt: skip
    """The first layer's keys and values do not depend on attention: 16 bits of them, rounded, are what 8 bits keep."""
    case, *others = SETUPS[setup]
    monkeypatch.setitem(SETUPS, setup, (scaled(place, case, key, value), *others))
    HostKernel.schedule = SCHEDULES[0]
    kept = []
    for kv in (None, Format.FP8):
        backend = load(setup, kv=kv, fmt=fmt)
        sequence = backend.new_sequence()
        backend.logits(TOKENS[:34], sequence, chunk=chunk)
        kept.append(stored(backend, sequence, 0, 34))
    for wide, narrow in zip(*kept, strict=True):
        assert np.array_equal(narrow, fp8_heads(wide))
        assert np.abs(wide).max() > 0


@pytest.mark.parametrize("chunk", [None, 0], ids=["rows", "token by token"])
@pytest.mark.parametrize(
    ("setup", "ahead", "count", "fmt"),
    in_formats(
        ("two workers", 61, 3),
        ("odd heads", 62, 4),
        ("splits", 70, 5),
        ("large head", 76, 3),
        ("window", 75, 3),
        ("experts", 40, 3),
    ),
)
def test_what_is_kept_is_read_as_the_reference_reads_it(
    load: Load, place: Path, fmt: Format, chunk: int | None, setup: str, ahead: int, count: int
) -> None:
    """The reference goes on from the kernel's own KV: a bit that bf16 lost before rounding may cost a whole code."""
    backend, want = (
        load(setup, kv=Format.FP8, fmt=fmt),
        reference(place / SETUPS[setup][0], CONTEXT, kv_dtype="fp8"),
    )
    seen, more = [], TOKENS[ahead : ahead + count]
    for schedule in SCHEDULES:
        HostKernel.schedule = schedule
        sequence = backend.new_sequence()
        backend.logits(TOKENS[:ahead], sequence)
        before = [stored(backend, sequence, layer, ahead) for layer in range(backend.gpu_rank.kv.layers)]
        seen.append(backend.logits(more, sequence, chunk=chunk))
    assert np.array_equal(*seen)
    # The experts' window has nine positions, so that one other code of a new key shows.
    far = TOLERANCE if setup == "experts" else FAR[fmt]
    assert distance(seen[0], continued(want, before, ahead, more)) < far


@pytest.mark.parametrize(
    "setup", ["two workers", pytest.param("splits", marks=pytest.mark.wide), "large head"]
)
def test_drafts_change_no_token(load: Load, setup: str) -> None:
    """Rows of a pass store and read their keys and values as tokens one by one do."""
    drafts_change_nothing(load(setup, rows=4, kv=Format.FP8), Job(TOKENS[:22], 0, 24, logprobs=2))


@pytest.mark.long
def test_drafts_that_see_more_than_the_ring_keeps(load: Load) -> None:
    """From position 480 on: the newest unit then comes into the ring after its rows were stored."""
    backend = load("large head", 96, rows=4, context=544, kv=Format.FP8)
    pages, unit = backend.gpu_rank.pages, backend.gpu_rank.kv.unit_bytes
    assert (pages.ring - 1) * (pages.bytes // unit) * UNIT_POSITIONS == 480
    prompt = tuple(np.random.default_rng(6).integers(3, VOCAB, 474).tolist())
    drafts_change_nothing(backend, Job(prompt, 0, 24, logprobs=2))


def drafts_change_nothing(backend: CudaBackend, job: Job) -> None:
    HostKernel.schedule = SCHEDULES[0]
    alone = answer(backend, plain(job))
    for schedule, wrong in zip(SCHEDULES, (0.0, 0.3), strict=True):
        HostKernel.schedule = schedule
        drafted = answer(backend, predicting(job, alone.ids, wrong, VOCAB))
        assert drafted.told == alone.told
        assert drafted.accepted > 8 or wrong


def test_a_chunk_of_rows_more_changes_nothing_that_is_stored(load: Load) -> None:
    backend = load("two workers", kv=Format.FP8)
    HostKernel.schedule = SCHEDULES[0]
    kept = []
    for parts in ((70,), (64, 6), (33, 37)):
        sequence, start = backend.new_sequence(), 0
        for part in parts:
            backend.logits(TOKENS[start : start + part], sequence)
            start += part
        kept.append(stored(backend, sequence, 0, 70))
    for others in kept[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(kept[0], others, strict=True))


def test_a_key_that_is_not_finite_is_not_hidden(
    load: Load, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes have no infinity: its head's power of two is no number, and the logits are none."""
    monkeypatch.setitem(SETUPS, "two workers", (scaled(place, "narrow", 1.0, 1e38), 2, 8))
    backend = load("two workers", kv=Format.FP8)
    with pytest.raises(NumericalFault):
        backend.logits(TOKENS[:5], backend.new_sequence(), chunk=0)
