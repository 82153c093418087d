"""weights/tied.py: a stored head is left out only where it repeats the embedding value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.weights import tied
from monotape.weights.check import check_tensors
from monotape.weights.open import open_checkpoint
from monotape.weights.tied import EMBEDDINGS, HEAD
from weights.safetensors_files import to_bf16, write_folder
from weights.test_check import CONFIG, _spec, _tensors

ROWS, WIDTH = CONFIG["vocab_size"], CONFIG["hidden_size"]


def _folder(tmp_path: Path, head: tuple[str, NDArray[Any]], embedding: tuple[str, NDArray[Any]]) -> Path:
    tensors = _tensors(_spec(tie_word_embeddings=True)) | {EMBEDDINGS[0]: embedding, HEAD: head}
    return write_folder(tmp_path, tensors, **CONFIG, model_type="qwen2", tie_word_embeddings=True)


def _matrix() -> NDArray[np.float32]:
    """Values that 16 bits hold as well."""
    values = np.random.default_rng(5).standard_normal((ROWS, WIDTH)).astype(np.float16).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def _stored(kind: str, values: NDArray[np.float32]) -> tuple[str, NDArray[Any]]:
    return kind, {"F32": values, "F16": values.astype(np.float16), "BF16": to_bf16(values)}[kind]


@pytest.mark.parametrize("chunk", [1, 5 * WIDTH, 1 << 22])
@pytest.mark.parametrize(
    ("one", "other"), [("F32", "F32"), ("BF16", "BF16"), ("F16", "BF16"), ("F32", "BF16")]
)
def test_a_copy_is_dropped_at_any_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str, other: str, chunk: int
) -> None:
    monkeypatch.setattr(tied, "_CHUNK_VALUES", chunk)
    opened = open_checkpoint(_folder(tmp_path, _stored(one, _matrix()), _stored(other, _matrix())))
    assert opened.config["tie_word_embeddings"] is True
    assert HEAD not in opened.names
    check_tensors(spec_from_config(opened.config), opened)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("row", range(0, ROWS, 4))
def test_one_other_value_anywhere_makes_it_another_matrix(tmp_path: Path, kind: str, row: int) -> None:
    head = _matrix()
    head[row, row % WIDTH] *= 2
    opened = open_checkpoint(_folder(tmp_path, _stored(kind, head), _stored(kind, _matrix())))
    spec = spec_from_config(opened.config)
    assert not spec.tied
    assert HEAD in spec.notes[0]
    check_tensors(spec, opened)
    assert np.array_equal(opened.rows(HEAD, 0, ROWS), head)


def test_both_zeros_are_the_same_number(tmp_path: Path) -> None:
    one, other = _matrix(), _matrix()
    one[3], other[3] = 0.0, -0.0
    opened = open_checkpoint(_folder(tmp_path, _stored("BF16", one), _stored("BF16", other)))
    assert HEAD not in opened.names


def test_a_head_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    head = _stored("F32", np.ones((ROWS + 1, WIDTH), np.float32))
    opened = open_checkpoint(_folder(tmp_path, head, _stored("F32", _matrix())))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[18, 12\]"):
        check_tensors(spec_from_config(opened.config), opened)


def test_a_head_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    head = ("F8_E4M3", np.ones((ROWS, WIDTH), np.uint8))
    opened = open_checkpoint(_folder(tmp_path, head, _stored("F32", _matrix())))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*f8_e4m3"):
        check_tensors(spec_from_config(opened.config), opened)


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _stored("F32", _matrix()), _stored("F32", _matrix()))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter") as caught:
        open_checkpoint(folder)
    assert "Merge" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.bias", "model.embed_positions.weight", "model.layers.1.self_attn.o_proj.bias",
        "model.layers.0.mlp.down_proj.bias", "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight", "model.layers.0.mlp.up_proj.weight_scale",
        "model.norm.bias", "model.rotary_emb.inv_freq.weight",
    ],
)  # fmt: skip
def test_a_tensor_that_no_family_reads_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """transformers drops such tensors with a warning; whether the result is then right it does not know either."""
    tensors = _tensors(_spec()) | {name: ("F32", np.ones(WIDTH, np.float32))}
    folder = write_folder(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(_spec(), open_checkpoint(folder))
    assert name in caught.value.message
