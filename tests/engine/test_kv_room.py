"""How much KV may be kept: what the model that will be loaded leaves of the memory where its KV will lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from families import Case, make_checkpoint
from monotape.backends.cuda import detection
from monotape.backends.cuda.memory import memory_plan
from monotape.compiler.gpu import gpu_plan
from monotape.engine.config import EngineConfig
from monotape.engine.kv_room import kv_room_for, room_in_memory
from monotape.engine.startup import context_for
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.open import open_checkpoint

FREE = 1 << 30
PROCESSORS = 5  # of the fake GPU


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(detection, "why_not", lambda: None)
    wide = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "head_dim": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    opened = open_checkpoint(make_checkpoint(Case("roomy", "llama", wide), tmp_path))
    return spec_from_config(opened.config), opened


def room_of(model: Any, **settings: Any) -> Any:
    return kv_room_for(EngineConfig(**settings), *model)


def test_half_of_what_the_plan_leaves_may_be_kept(model: Any) -> None:
    spec, _ = model
    need = memory_plan(gpu_plan(spec, PROCESSORS, spec.context, Format.BF16))
    with fake_gpu(FakeCuda(memory=FREE)):
        room = room_of(model, speculation=False)
        assert room.position == need.kv_per_position
        assert room.budget == (FREE - need.total + need.kv) // 2
        assert room_of(model, kv_bytes=77).budget == 77


def test_without_a_gpu_the_configured_budget_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "why_not", lambda: "")
    assert room_of(model) == room_in_memory(EngineConfig(), model[0])


def test_weights_in_fewer_bits_leave_more(model: Any) -> None:
    spec, _ = model
    with fake_gpu(FakeCuda(memory=FREE)):
        gained = (
            room_of(model, dtype="int4", speculation=False).budget - room_of(model, speculation=False).budget
        )
    bf16, int4 = (
        memory_plan(gpu_plan(spec, PROCESSORS, spec.context, Format.BF16, stage_formats=formats)).weights
        for formats in (None, dict.fromkeys(("qkv", "output", "gate_up", "down"), Format.INT4_G128))
    )
    assert gained > 0 and abs(2 * gained - (bf16 - int4)) < 0.02 * bf16


def test_ranks_share_the_weights(model: Any) -> None:
    """Two GPUs keep more than twice the KV of one, which holds all weights; two ranks on one GPU less than that."""
    with fake_gpu(FakeCuda(memory=FREE, devices=2)):
        alone = room_of(model, speculation=False).budget
        two = room_of(model, tp=2).budget
        emulated = room_of(model, tp=2, emulate_ranks=True).budget
    assert two > 2 * alone > 1.9 * emulated


def test_a_model_that_nearly_fills_the_gpu_gets_the_context_that_is_left(model: Any) -> None:
    """Not the least one: 16 bits a parameter would leave nothing of it."""
    spec, _ = model
    need = memory_plan(gpu_plan(spec, PROCESSORS, spec.context, Format.BF16))
    config = EngineConfig(speculation=False)
    with fake_gpu(FakeCuda(memory=need.total + need.kv)):
        assert context_for(config, spec, kv_room_for(config, *model)) == spec.context
    with fake_gpu(FakeCuda(memory=need.total - need.kv)):
        assert kv_room_for(config, *model).budget == 0


def test_a_model_that_no_gpu_runs_is_left_to_loading(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "why_not", lambda: None)
    opened = open_checkpoint(checkpoint("llama"))  # heads of 10 values
    spec = spec_from_config(opened.config)
    with fake_gpu(FakeCuda(memory=FREE)):
        assert kv_room_for(EngineConfig(), spec, opened) == room_in_memory(EngineConfig(), spec)
