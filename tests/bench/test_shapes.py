"""Random weights of named shapes: the same however they are read, small, and readable as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shapes
from checkpoint_file import write_checkpoint
from measuring import open_model, prompt_of, short_name
from monotape.models.registry import spec_from_config
from monotape.weights.check import check_tensors
from monotape.weights.open import open_checkpoint
from shapes import SHAPES, RandomCheckpoint

TINY = {
    **SHAPES["llama-3.1-8b"], "num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 90, "vocab_size": 77,
}  # fmt: skip
HEAD, GATE = "lm_head.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "tiny"


@pytest.mark.parametrize("pool", [(1 << 22) + 15, 501])
def test_values_do_not_depend_on_how_they_are_read(
    tiny: str, pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "_POOL", pool)
    made = RandomCheckpoint(tiny)
    for name in (HEAD, GATE):
        rows = made.shape(name)[0]
        whole = made.rows(name, 0, rows)
        assert np.array_equal(np.concatenate([made.rows(name, 0, 5), made.rows(name, 5, rows)]), whole)
        assert np.isfinite(whole).all()
        halves = made.half_rows(name, 3, 9)
        assert halves is not None
        assert np.array_equal((halves.astype(np.uint32) << 16).view(np.float32), whole[3:9])
    assert not np.array_equal(made.rows(HEAD, 0, 9), made.rows(GATE, 0, 9))


def test_rows_differ_and_have_the_scale_of_a_model() -> None:
    rows = RandomCheckpoint("smollm2-135m").rows("model.layers.3.mlp.up_proj.weight", 0, 1536)
    assert len(np.unique(rows, axis=0)) == 1536
    assert rows.std() == pytest.approx(576**-0.5, rel=0.02)


def test_a_shape_becomes_a_checkpoint(tiny: str, tmp_path: Path) -> None:
    opened = open_checkpoint(write_checkpoint(tiny, tmp_path))
    made, path = open_model(tiny)
    assert path is None
    check_tensors(spec_from_config(opened.config), opened)
    for name in opened.names:
        rows = opened.shape(name)[0]
        assert opened.stored_as(name) == "bf16"
        assert np.array_equal(opened.rows(name, 0, rows), made.rows(name, 0, rows))


def test_prompts_are_ids_and_seeds_differ() -> None:
    prompt = prompt_of(500, 77)
    assert min(prompt) >= 1 and max(prompt) <= 76
    assert len(set(prompt)) > 70
    assert prompt_of(500, 77, seed=1)[:3] != prompt[:3]


@pytest.mark.parametrize(("device", "expected"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")])
def test_gpus_have_short_names(device: str, expected: str) -> None:
    assert short_name(device) == expected
