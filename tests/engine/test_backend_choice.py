"""Which backend "auto" takes, what it says about that, and in which format weights go onto a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from families import BY_NAME, Case, make_checkpoint
from monotape.backends.cuda import detection
from monotape.engine import loading
from monotape.engine.asked import Asked, formats_for
from monotape.engine.config import EngineConfig
from monotape.engine.formats import Chosen
from monotape.engine.kv_room import kv_room_for
from monotape.engine.loading import choose_backend, load_backend, planned
from monotape.engine.wake import wake
from monotape.errors import BackendUnavailable, UnsupportedModel, UsageError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.plan.gpu import GpuPlan
from monotape.weights.open import open_checkpoint

OTHER_GPU = "The GPU is a GeForce; the CUDA backend is written for Hopper (H100, H200)."


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets what detection finds: None for a Hopper that can be used, else the reason against it."""
    loading._note.cache_clear()
    return lambda reason: monkeypatch.setattr(detection, "why_not", lambda: reason)


def test_auto_takes_a_hopper(gpu: Any) -> None:
    gpu(None)
    assert (
        choose_backend("auto") == choose_backend("auto", "bf16") == choose_backend("auto", "half") == "cuda"
    )


def test_auto_takes_the_cores_where_there_is_no_gpu(gpu: Any, caplog: Any) -> None:
    gpu("")
    assert choose_backend("auto") == "cpu"
    assert not caplog.records


def test_another_gpu_is_left_alone_with_a_note_said_once(gpu: Any, caplog: Any) -> None:
    gpu(OTHER_GPU)
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto") == choose_backend("auto") == "cpu"
    assert caplog.messages == [f"{OTHER_GPU} Using the CPU."]


def test_what_only_the_cores_can_do_goes_to_them(gpu: Any) -> None:
    gpu(None)
    assert choose_backend("auto", "f32") == choose_backend("auto", "auto", 3) == "cpu"
    assert choose_backend("auto", "fp8") == choose_backend("auto", "int4") == "cuda"


@pytest.mark.parametrize(
    ("settings", "woken"),
    [
        ({}, True), ({"backend": "cuda"}, True), ({"dtype": "bf16"}, True), ({"backend": "cpu"}, False),
        ({"backend": "reference"}, False), ({"dtype": "f32"}, False), ({"workers": 3}, False),
    ],
)  # fmt: skip
def test_a_gpu_is_woken_where_it_may_be_needed(
    settings: dict[str, Any], woken: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(None)
    calls: list[bool] = []
    monkeypatch.setattr(detection, "wake_gpu", lambda: calls.append(True))
    config = EngineConfig(**settings)
    wake(config)
    assert calls == [True] * woken
    if woken:
        assert choose_backend(config.backend, config.dtype, config.workers) == "cuda"


def test_ranks_go_to_the_cores_with_a_note_where_a_gpu_was_passed_over(
    gpu: Any, caplog: Any, checkpoint: Callable[[str], Path]
) -> None:
    gpu("")
    assert choose_backend("auto", ranks=2) == "cpu"
    assert not caplog.records
    gpu(None)
    with fake_gpu(FakeCuda()):
        assert choose_backend("auto", ranks=2) == "cpu"
        assert caplog.messages == ["2 ranks were asked for, but this machine has 1 GPU. Using the CPU."]
        opened = open_checkpoint(checkpoint("llama-tied"))
        spec = spec_from_config(opened.config)
        plan = planned("auto", spec, opened, dtype="auto", context=64, workers=None, tp=2)
        assert (plan.machine.kind, len(plan.ranks)) == ("cpu", 2)
        assert kv_room_for(EngineConfig(tp=2), spec, opened).budget == EngineConfig().kv_budget
        assert choose_backend("auto", ranks=2, emulate_ranks=True) == "cuda"
    with fake_gpu(FakeCuda(devices=2)):
        assert choose_backend("auto", ranks=2) == "cuda"


def test_an_explicit_backend_is_taken_at_its_word(gpu: Any) -> None:
    gpu(OTHER_GPU)
    assert choose_backend("cuda") == "cuda"
    with pytest.raises(UsageError, match="no backend 'gpu'"):
        choose_backend("gpu")


def test_an_explicit_cuda_on_another_gpu_is_refused(checkpoint: Callable[[str], Path]) -> None:
    opened = open_checkpoint(checkpoint("llama-tied"))
    with (
        fake_gpu(FakeCuda("NVIDIA B200", (10, 0))),
        pytest.raises(BackendUnavailable, match=r"The GPU is a NVIDIA B200;.*Hopper"),
    ):
        load_backend("cuda", spec_from_config(opened.config), opened, context=64)


def test_a_model_that_the_kernel_does_not_run_goes_to_the_cores(
    checkpoint: Callable[[str], Path], gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    gpu(None)

    def refuse(*arguments: Any) -> None:
        raise UnsupportedModel("Heads of 7 values.", "")

    monkeypatch.setattr(loading, "_load_cuda", refuse)
    opened = open_checkpoint(checkpoint("llama-tied"))
    spec = spec_from_config(opened.config)
    backend = load_backend("auto", spec, opened, context=64)
    assert backend.name == "cpu"
    backend.close()
    assert "Heads of 7 values. Using the CPU." in caplog.messages
    with pytest.raises(UnsupportedModel):
        load_backend("cuda", spec, opened, context=64)


@pytest.mark.parametrize(
    ("stored", "dtype", "expected"),
    [
        ("float16", "auto", Format.F16), ("bfloat16", "auto", Format.BF16), ("float32", "auto", Format.BF16),
        ("float32", "f16", Format.F16), ("float16", "bfloat16", Format.BF16),
    ],
)  # fmt: skip
def test_the_format_on_a_gpu(tmp_path: Path, stored: str, dtype: str, expected: Format) -> None:
    opened = open_checkpoint(make_checkpoint(BY_NAME["llama-tied"], tmp_path, stored))
    source, chosen = formats_for("cuda", Asked(dtype), spec_from_config(opened.config), opened)
    assert source is opened and replace(chosen, notes=()) == Chosen(expected)
    assert bool(chosen.notes) == ((stored, dtype) == ("float32", "auto"))


def test_a_gpus_plan_needs_no_gpu(tmp_path: Path) -> None:
    opened = open_checkpoint(make_checkpoint(Case("planned", "llama", {"head_dim": 16}), tmp_path))
    spec = spec_from_config(opened.config)
    plan = planned("cuda", spec, opened, dtype="auto", context=64, workers=7)
    assert isinstance(plan, GpuPlan)
    assert (plan.plan.machine.kind, plan.workers, plan.plan.format) == ("cuda", 7, Format.BF16)
    shared = planned("cuda", spec, opened, dtype="auto", context=64, workers=7, tp=2)
    assert isinstance(shared, GpuPlan)
    assert (shared.workers, len(shared.ranks)) == (7, 2)
    with pytest.raises(UsageError, match="no kernels for f32 weights"):
        planned("cuda", spec, opened, dtype="f32", context=64, workers=7)
