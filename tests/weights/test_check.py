"""weights/check.py: tensors that are missing, misshapen, unreadable, left over or not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.weights.check import check_tensors, read_role, require_finite
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.gguf_file import GgufFile
from monotape.weights.open import open_checkpoint
from weights.gguf_files import HEAD_DIM, HEADS, KV_HEADS, WIDTH, model_values, write_model
from weights.safetensors_files import to_bf16, write_folder

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 17, "max_position_embeddings": 50,
}  # fmt: skip

Tensors = dict[str, tuple[str, NDArray[Any]]]


def _spec(**fields: Any) -> ModelSpec:
    return spec_from_config(CONFIG | fields)


def _tensors(spec: ModelSpec) -> Tensors:
    """Every tensor that the spec names, in bf16 so that shapes and formats are both in play."""
    rng = np.random.default_rng(1)
    found: Tensors = {}
    for layer in range(spec.layers):
        for role, source in spec.layer_tensors.items():
            values = rng.standard_normal(spec.shape_of(role)).astype(np.float32)
            found[source.in_layer(layer)] = ("BF16", to_bf16(values))
    for role, source in spec.model_tensors.items():
        values = rng.standard_normal(spec.shape_of(role)).astype(np.float32)
        found[source.name] = ("F32", values)
    return found


def _open(tmp_path: Path, tensors: Tensors) -> Checkpoint:
    return open_checkpoint(write_folder(tmp_path, tensors))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_that_fits(tmp_path: Path, tied: bool) -> None:
    spec = _spec(tie_word_embeddings=tied)
    check_tensors(spec, _open(tmp_path, _tensors(spec)))


def test_harmless_tensors_are_let_through(tmp_path: Path) -> None:
    spec = _spec(tie_word_embeddings=True)
    tensors = _tensors(spec)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = ("F32", np.ones(2, np.float32))
    check_tensors(spec, _open(tmp_path, tensors))


def test_a_head_that_a_tied_spec_does_not_read_is_left_over(tmp_path: Path) -> None:
    """Only the checkpoint itself knows whether a head is a copy (weights/tied.py); what it still names is read."""
    spec = _spec(tie_word_embeddings=True)
    tensors = _tensors(spec)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"does not use: lm_head\.weight"):
        check_tensors(spec, _open(tmp_path, tensors))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    spec = _spec()
    tensors = _tensors(spec)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight \(up\)"):
        check_tensors(spec, _open(tmp_path, tensors))


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    tensors = _tensors(_spec(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head\.weight"):
        check_tensors(_spec(tie_word_embeddings=False), _open(tmp_path, tensors))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.down_proj.weight", (14, 12)),
        ("model.layers.0.self_attn.k_proj.bias", (5,)),
        ("model.norm.weight", (12, 1)),
        ("model.embed_tokens.weight", (18, 12)),
    ],
)
def test_a_shape_that_contradicts_the_config(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    spec = _spec()
    tensors = _tensors(spec)
    expected = list(tensors[name][1].shape)
    tensors[name] = ("F32", np.ones(shape, np.float32))
    with pytest.raises(CheckpointError) as caught:
        check_tensors(spec, _open(tmp_path, tensors))
    assert f"{name} has shape {list(shape)}, but the config asks for {expected}" in str(caught.value)
    assert caught.value.hint


def test_a_format_that_cannot_be_read_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    spec = _spec()
    tensors = _tensors(spec)
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors[name] = ("F8_E4M3", np.zeros((14, 12), np.uint8))
    with pytest.raises(CheckpointError, match="stored as f8_e4m3"):
        check_tensors(spec, _open(tmp_path, tensors))


def test_tensors_that_nobody_reads_are_an_error(tmp_path: Path) -> None:
    spec = _spec()
    tensors = _tensors(spec) | {f"extra.{index}": ("F32", np.ones(1, np.float32)) for index in range(7)}
    with pytest.raises(CheckpointError, match=r"7 tensors .* extra\.0, extra\.1, extra\.2, extra\.3, \.\.\."):
        check_tensors(spec, _open(tmp_path, tensors))


def test_more_layers_than_the_config_says_are_an_error(tmp_path: Path) -> None:
    tensors = _tensors(_spec(num_hidden_layers=3))
    with pytest.raises(CheckpointError, match=r"of 2 layers does not use: model\.layers\.2\."):
        check_tensors(_spec(), _open(tmp_path, tensors))


def test_fused_tensors_are_checked_and_read_by_role(tmp_path: Path) -> None:
    values = model_values("phi3")
    opened = GgufFile(write_model(tmp_path / "m.gguf", "phi3", values))
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    qkv, gate_up = values["blk.2.attn_qkv.weight"], values["blk.2.ffn_up.weight"]
    q, kv, ffn = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, spec.ffn
    parts = {
        "q": qkv[:q], "k": qkv[q : q + kv], "v": qkv[q + kv :], "gate": gate_up[:ffn], "up": gate_up[ffn:],
        "down": values["blk.2.ffn_down.weight"], "attention_norm": values["blk.2.attn_norm.weight"],
    }  # fmt: skip
    for role, exact in parts.items():
        rows = read_role(spec, opened, role, 2, 3, len(exact) - 1)
        assert np.array_equal(rows, exact[3:-1]), role
    assert np.array_equal(read_role(spec, opened, "embedding", None, 5, 9), values["token_embd.weight"][5:9])
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has shape .* asks for"):
        check_tensors(replace(spec, layer_tensors=_longer(spec, "v")), opened)


def _longer(spec: ModelSpec, role: str) -> dict[str, Any]:
    """The same tensors, with a role's rows moved past the end."""
    source = spec.layer_tensors[role]
    assert source.rows is not None
    moved = replace(source, rows=(source.rows[0] + 1, source.rows[1] + 1))
    return {**spec.layer_tensors, role: moved}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_named_with_their_row(tmp_path: Path, bad: float) -> None:
    values = model_values("phi3")
    qkv = values["blk.1.attn_qkv.weight"]
    row = HEADS * HEAD_DIM + 5
    qkv[row, WIDTH - 1] = bad
    opened = GgufFile(write_model(tmp_path / "m.gguf", "phi3", values))
    spec = spec_from_config(opened.config)
    with pytest.raises(
        CheckpointError, match=rf"model\.layers\.1\.self_attn\.qkv_proj\.weight holds {bad} in row {row}"
    ):
        read_role(spec, opened, "k", 1, 2, 9)
    read_role(spec, opened, "k", 1, 6, 9)
    read_role(spec, opened, "q", 1, 0, spec.q_rows)


def test_require_finite_takes_vectors_too() -> None:
    array = np.ones(9, np.float32)
    require_finite("v", array, 4)
    array[7] = np.inf
    with pytest.raises(CheckpointError, match="Tensor v holds inf in row 11"):
        require_finite("v", array, 4)
