"""weights/gguf_file.py: names, row order and numbers of every format; twice-stored embeddings; tokenizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.weights.check import check_tensors
from monotape.weights.gguf_file import GgufFile
from weights.gguf_files import (
    HEADS,
    KV_HEADS,
    LAYERS,
    READABLE,
    TOKENS,
    VOCAB,
    WIDTH,
    interleaved,
    model_metadata,
    model_values,
    random_blocks,
    stored,
    write_gguf,
    write_model,
)
from weights.gguf_models import write_wide_model

INTEGER = (Kind.Q8_0, Kind.Q5_0, Kind.Q4_0)
SPANS = [(0, 7), (2, 3), (6, 7), (4, 4)]


def _one_tensor(tmp_path: Path, kind: Kind, raw: NDArray[np.uint8]) -> GgufFile:
    """A tensor "x" in an architecture that is not known, so that nothing is made of it."""
    return GgufFile(write_gguf(tmp_path / "x.gguf", "other", {}, {"x": (kind, raw)}))


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("start", "stop"), SPANS)
def test_rows_of_every_format(tmp_path: Path, kind: Kind, start: int, stop: int) -> None:
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        raw = stored(np.random.default_rng(3).standard_normal((7, 512)).astype(np.float32), kind)
    else:
        raw = random_blocks(kind, 7, 512, seed=3)
        raw = _with_finite_scales(raw, kind)
    opened = _one_tensor(tmp_path, kind, raw)
    assert opened.shape("x") == (7, 512)
    assert opened.stored_as("x") == kind.name.lower()
    rows = opened.rows("x", start, stop)
    assert rows.dtype == np.float32
    assert rows.shape == (stop - start, 512)
    assert np.array_equal(rows, dequantize(raw, kind)[start:stop])
    assert rows.flags.writeable, "rows must not be a view of the file"


def _with_finite_scales(raw: NDArray[np.uint8], kind: Kind) -> NDArray[np.uint8]:
    """Formats with 32 values a block: the leading f16 scale (and minimum) as a small number."""
    if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return raw
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = raw.reshape(-1, size)
    count = 2 if kind == Kind.Q4_1 else 1
    scales = np.random.default_rng(4).uniform(-0.1, 0.1, (len(blocks), count)).astype(np.float16)
    blocks[:, : 2 * count] = scales.view(np.uint8)
    return blocks.reshape(raw.shape)


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_integer_rows_are_exact_or_absent(tmp_path: Path, kind: Kind) -> None:
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        raw = stored(np.ones((5, 512), np.float32), kind)
    else:
        raw = _with_finite_scales(random_blocks(kind, 5, 512, seed=8), kind)
    opened = _one_tensor(tmp_path, kind, raw)
    found = opened.integer_rows("x", 1, 4)
    if kind not in INTEGER:
        assert found is None
        return
    assert found is not None
    values, scales = found
    assert (values.dtype, scales.dtype) == (np.int8, np.float16)
    assert (values.shape, scales.shape) == ((3, 512), (3, 16))
    assert values.flags.c_contiguous
    assert scales.flags.c_contiguous
    exact = values.reshape(3, 16, 32).astype(np.float32) * scales[..., None].astype(np.float32)
    assert np.array_equal(exact.reshape(3, 512), opened.rows("x", 1, 4))
    span = {Kind.Q8_0: (-128, 127), Kind.Q5_0: (-16, 15), Kind.Q4_0: (-8, 7)}[kind]
    assert (values.min(), values.max()) == span, "random bits reach both ends"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0], ids=lambda kind: kind.name)
def test_half_rows_are_the_stored_words_or_absent(tmp_path: Path, kind: Kind) -> None:
    raw = stored(np.random.default_rng(5).standard_normal((5, 64)).astype(np.float32), kind)
    opened = _one_tensor(tmp_path, kind, raw)
    found, whole = opened.half_rows("x", 1, 4), opened.mapped_halves("x")
    if kind in (Kind.F32, Kind.Q8_0):
        assert found is whole is None
        return
    assert found is not None and whole is not None
    assert np.array_equal(whole[1:4], found) and not whole.flags.owndata
    assert found.shape == (3, 64)
    assert np.array_equal(found.view(np.uint8), raw[1:4].view(np.uint8).reshape(3, -1))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_half_rows_of_a_rotated_matrix_are_in_hugging_face_order(tmp_path: Path, kind: Kind) -> None:
    kinds = {"blk.1.attn_q.weight": kind}
    opened = GgufFile(write_model(tmp_path / "m.gguf", "llama", model_values("llama", True), kinds))
    name = "model.layers.1.self_attn.q_proj.weight"
    rows, halves = opened.rows(name, 2, 9), opened.half_rows(name, 2, 9)
    assert halves is not None
    assert opened.mapped_halves(name) is None, "its rows lie in another order"
    wide = halves.view(np.float16).astype(np.float32)
    if kind == Kind.BF16:
        wide = (halves.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(wide, rows)


def test_other_formats_are_refused_by_name_when_asked_for(tmp_path: Path) -> None:
    opened = _one_tensor(tmp_path, Kind.Q2_K, np.zeros((3, 84), np.uint8))
    assert opened.stored_as("x") == "q2_k"
    with pytest.raises(CheckpointError, match=r"tensor x is stored as q2_k.*q4_k"):
        opened.rows("x", 0, 1)


@pytest.mark.skipif(not hasattr(Kind, "NVFP4"), reason="this version of the gguf package has no NVFP4")
def test_nvfp4_is_refused_though_safetensors_have_a_format_of_that_name(tmp_path: Path) -> None:
    """Its blocks have another layout, which no reader of a matrix here knows."""
    kind = Kind["NVFP4"]
    opened = _one_tensor(tmp_path, kind, np.zeros((3, 72), np.uint8))
    assert opened.shape("x") == (3, 128) and opened.stored_matrix("x") is None
    model = GgufFile(write_wide_model(tmp_path / "m.gguf", {"1.ffn_down": kind}))
    for name, refused in (
        ("x", partial(opened.rows, "x", 0, 1)),
        (
            "model.layers.1.mlp.down_proj.weight",
            partial(check_tensors, spec_from_config(model.config), model),
        ),
    ):
        with pytest.raises(
            CheckpointError, match=rf"tensor {name} is stored as gguf-nvfp4, which .* not read"
        ) as error:
            refused()
        assert "mxfp4" in error.value.hint and "nvfp4" not in error.value.hint


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_has_its_hugging_face_names_shapes_and_values(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    values = model_values(architecture, tied)
    opened = GgufFile(write_model(tmp_path / "m.gguf", architecture, values))
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    assert spec.tied == tied
    assert len(opened.names) == len(values)
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.gate_up_proj" if architecture == "phi3" else "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_qkv": "self_attn.qkv_proj",
    }  # fmt: skip
    for name, array in values.items():
        *layer, part, end = name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        expected = f"{prefix}{names[part]}.{end}"
        assert opened.shape(expected) == array.shape
        assert np.array_equal(opened.rows(expected, 0, len(array)), array), expected
        middle = len(array) // 3
        assert np.array_equal(opened.rows(expected, middle, len(array) - 1), array[middle:-1]), expected


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_0, Kind.Q4_1])
def test_llama_rows_come_back_in_order_whatever_the_span(tmp_path: Path, kind: Kind) -> None:
    values = model_values("llama")
    kinds = {f"blk.1.attn_{part}.weight": kind for part in "qk"}
    opened = GgufFile(write_model(tmp_path / "m.gguf", "llama", values, kinds))
    for part, rows in (("q", 96), ("k", 32)):
        name, array = f"model.layers.1.self_attn.{part}_proj.weight", values[f"blk.1.attn_{part}.weight"]
        exact = array if kind == Kind.F32 else dequantize(stored(array, kind), kind)
        for start, stop in [(0, rows), (0, 1), (1, 2), (7, 9), (5, 29), (rows - 3, rows), (16, 32), (8, 8)]:
            assert np.array_equal(opened.rows(name, start, stop), exact[start:stop]), (part, start, stop)
            found = opened.integer_rows(name, start, stop)
            assert (found is not None) == (kind in INTEGER)
            if found is not None:
                blocks = found[0].reshape(stop - start, 3, 32) * found[1][..., None].astype(np.float32)
                assert np.array_equal(blocks.reshape(stop - start, 96), exact[start:stop])


def test_llama_biases_are_put_in_order_too(tmp_path: Path) -> None:
    values = model_values("llama")
    rng = np.random.default_rng(2)
    for layer in range(LAYERS):
        values[f"blk.{layer}.attn_q.bias"] = rng.standard_normal(96).astype(np.float32)
        values[f"blk.{layer}.attn_k.bias"] = rng.standard_normal(32).astype(np.float32)
    opened = GgufFile(write_model(tmp_path / "m.gguf", "llama", values))
    assert opened.config["attention_bias"] is True
    for part in "qk":
        bias = values[f"blk.2.attn_{part}.bias"]
        assert np.array_equal(opened.rows(f"model.layers.2.self_attn.{part}_proj.bias", 3, 27), bias[3:27])
    assert opened.integer_rows("model.layers.2.self_attn.q_proj.bias", 3, 27) is None


def test_interleaving_is_that_of_the_converter() -> None:
    """Two heads of six rows: the halves 0 1 2 and 3 4 5 of a head become 0 3 1 4 2 5."""
    rows = np.arange(12, dtype=np.float32)[:, None]
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def _twice_stored(tmp_path: Path, embedding: tuple[Kind, int], head: tuple[Kind, int]) -> GgufFile:
    """A model whose embedding and head are drawn from the given seeds and stored in the given formats."""
    values = model_values("qwen2", tied=False)
    for name, (_, seed) in (("token_embd.weight", embedding), ("output.weight", head)):
        values[name] = np.random.default_rng(seed).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    kinds = {"token_embd.weight": embedding[0], "output.weight": head[0]}
    return GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values, kinds))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.F16, Kind.F32])
def test_a_matrix_stored_twice_is_tied(tmp_path: Path, kind: Kind) -> None:
    opened = _twice_stored(tmp_path, (kind, 9), (kind, 9))
    assert opened.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in opened.names
    check_tensors(spec_from_config(opened.config), opened)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [(Kind.Q5_0, Kind.Q8_0), (Kind.Q4_0, Kind.Q8_0), (Kind.Q4_1, Kind.F16), (Kind.F16, Kind.Q5_0)],
)
def test_a_matrix_at_two_precisions_is_used_as_stored(tmp_path: Path, embedding: Kind, head: Kind) -> None:
    """As llama.cpp and transformers do: neither copy stands in for the other."""
    opened = _twice_stored(tmp_path, (embedding, 9), (head, 9))
    exact = np.random.default_rng(9).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    assert opened.config["tie_word_embeddings"] is False
    for name, kind in (("model.embed_tokens.weight", embedding), ("lm_head.weight", head)):
        assert np.array_equal(opened.rows(name, 0, VOCAB), dequantize(stored(exact, kind), kind))


def test_of_two_equal_copies_the_smaller_is_read(tmp_path: Path) -> None:
    values = model_values("qwen2", tied=False)
    values["token_embd.weight"] = values["token_embd.weight"].astype(np.float16).astype(np.float32)
    values["output.weight"] = values["token_embd.weight"]
    kinds = {"token_embd.weight": Kind.F32, "output.weight": Kind.F16}
    opened = GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values, kinds))
    assert opened.config["tie_word_embeddings"] is True
    assert opened.stored_as("model.embed_tokens.weight") == "f16"
    assert np.array_equal(opened.rows("model.embed_tokens.weight", 0, VOCAB), values["output.weight"])


@pytest.mark.parametrize("row", [0, 1, VOCAB // 2, VOCAB - 1])
def test_a_head_that_differs_in_one_row_is_used(tmp_path: Path, row: int) -> None:
    values = model_values("qwen2", tied=False)
    values["output.weight"] = values["token_embd.weight"].copy()
    values["output.weight"][row] *= 2
    opened = GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values))
    assert opened.config["tie_word_embeddings"] is False
    assert np.array_equal(opened.rows("lm_head.weight", 0, VOCAB), values["output.weight"])


def test_one_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    values = model_values("qwen2")
    values["model.layers.0.mlp.up_proj.weight"] = values["blk.0.ffn_up.weight"] * 2
    with pytest.raises(CheckpointError, match=r"has model\.layers\.0\.mlp\.up_proj\.weight twice"):
        GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values))


@pytest.mark.parametrize(
    ("embedding", "head"), [(Kind.Q5_0, Kind.Q8_0), (Kind.F32, Kind.F32), (Kind.Q8_0, Kind.Q8_0)]
)
def test_two_different_matrices_stay_apart(tmp_path: Path, embedding: Kind, head: Kind) -> None:
    opened = _twice_stored(tmp_path, (embedding, 9), (head, 10))
    assert opened.config["tie_word_embeddings"] is False
    assert "_monotape_notes" not in opened.config
    exact = np.random.default_rng(10).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    assert np.array_equal(opened.rows("lm_head.weight", 0, VOCAB), dequantize(stored(exact, head), head))


def test_the_same_format_with_other_numbers_is_another_matrix(tmp_path: Path) -> None:
    """A head that was trained on from the embedding is close to it, but the same rounding gives it away."""
    values = model_values("qwen2", tied=False)
    values["output.weight"] = values["token_embd.weight"] * np.float32(1.02)
    kinds = {"token_embd.weight": Kind.Q8_0, "output.weight": Kind.Q8_0}
    opened = GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values, kinds))
    assert opened.config["tie_word_embeddings"] is False


def test_nan_in_a_copy_is_left_for_the_check(tmp_path: Path) -> None:
    values = model_values("qwen2", tied=False)
    values["output.weight"] = values["token_embd.weight"].copy()
    values["output.weight"][0] = np.nan
    opened = GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values, {"token_embd.weight": Kind.F16}))
    assert opened.config["tie_word_embeddings"] is False


def test_release_keeps_the_values(tmp_path: Path) -> None:
    values = model_values("qwen2")
    opened = GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values))
    name = "model.layers.1.mlp.down_proj.weight"
    before = opened.rows(name, 0, WIDTH)
    opened.release(name)
    assert np.array_equal(before, values["blk.1.ffn_down.weight"])
    assert np.array_equal(opened.rows(name, 0, WIDTH), before)


def test_unknown_tensors_keep_their_names_and_fail_the_check(tmp_path: Path) -> None:
    values = model_values("qwen2")
    values["blk.0.attn_sinks.weight"] = np.ones(HEADS, np.float32)
    opened = GgufFile(write_model(tmp_path / "m.gguf", "qwen2", values))
    assert "blk.0.attn_sinks.weight" in opened.names
    with pytest.raises(CheckpointError, match=r"1 tensors that .* does not use: blk\.0\.attn_sinks\.weight"):
        check_tensors(spec_from_config(opened.config), opened)
    for ask in (opened.shape, opened.stored_as, opened.release):
        with pytest.raises(CheckpointError, match="has no tensor ghost"):
            ask("ghost")


def test_the_tokenizer_of_a_byte_level_model(tmp_path: Path) -> None:
    opened = GgufFile(write_model(tmp_path / "m.gguf"))
    assert opened.source == str(tmp_path / "m.gguf")
    text = opened.text
    assert text.chat_template == "{{ messages }}"
    assert text.tokenizer_json is None
    vocabulary = text.vocabulary
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "smollm")
    assert vocabulary.tokens == tuple(TOKENS)
    assert vocabulary.types == (*[1] * (VOCAB - 2), 3, 1)
    assert vocabulary.merges == ("t 1", "t 2")
    assert vocabulary.scores == ()
    assert (vocabulary.add_bos, vocabulary.add_space_prefix) == (False, False)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unknown_id) == (1, 2, None)
    assert opened.generation_config == {"eos_token_id": [2, VOCAB - 2]}, "the named one, then <|im_end|>"


def test_sampling_that_a_file_recommends_is_its_generation_config(tmp_path: Path) -> None:
    metadata = {
        "general.sampling.temp": 0.6, "general.sampling.top_p": 0.95, "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.05, "general.basename": "Some-Model",
    }  # fmt: skip
    opened = GgufFile(write_model(tmp_path / "m.gguf", metadata=metadata))
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling.items() <= opened.generation_config.items()
    assert opened.config["_name_or_path"] == "Some-Model"


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_bos_where_the_file_does_not_say(tmp_path: Path, pre: str, expected: bool) -> None:
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None}
    vocabulary = GgufFile(write_model(tmp_path / "m.gguf", metadata=metadata)).text.vocabulary
    assert vocabulary is not None
    assert vocabulary.add_bos is expected


def test_the_tokenizer_of_a_sentencepiece_model(tmp_path: Path) -> None:
    scores = [-0.5 * index for index in range(VOCAB)]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.merges": None,
        "tokenizer.ggml.pre": None, "tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": 0xFFFFFFFF, "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_template": None, "tokenizer.ggml.token_type": None,
    }  # fmt: skip
    opened = GgufFile(write_model(tmp_path / "m.gguf", metadata=metadata))
    vocabulary = opened.text.vocabulary
    assert vocabulary is not None
    assert vocabulary.scores == tuple(scores)
    assert (vocabulary.add_bos, vocabulary.add_space_prefix) == (True, True)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unknown_id) == (1, 2, 0)
    assert set(vocabulary.types) == {1}
    assert opened.text.chat_template is None
    assert opened.config["eos_token_id"] is None
    assert opened.generation_config == {"eos_token_id": [5]}


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    metadata = {key: None for key in model_metadata("llama") if key.startswith("tokenizer.")}
    opened = GgufFile(write_model(tmp_path / "m.gguf", metadata=metadata))
    assert opened.text.vocabulary is None
    assert opened.generation_config == {}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.token_type": [1, 2]}, f"{VOCAB} tokens but 2 entries"),
        ({"tokenizer.ggml.scores": [0.5]}, f"{VOCAB} tokens but 1 entries"),
        ({"tokenizer.ggml.unknown_token_id": VOCAB}, f"unknown token is {VOCAB}, but there are {VOCAB}"),
        ({"tokenizer.chat_template": 5}, "chat_template is not a text"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_refused(tmp_path: Path, metadata: dict, message: str) -> None:  # type: ignore[type-arg]
    opened = GgufFile(write_model(tmp_path / "m.gguf", metadata=metadata))
    with pytest.raises(CheckpointError, match=message):
        _ = opened.text


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*--merge"):
        GgufFile(write_model(tmp_path / "m.gguf", metadata={"split.count": 3}))


def test_rows_that_heads_cannot_share_are_refused(tmp_path: Path) -> None:
    values = model_values("llama")
    tensors = {name: (Kind.F32, array) for name, array in values.items()}
    tensors["blk.1.attn_k.weight"] = (Kind.F32, np.ones((KV_HEADS * 7, WIDTH), np.float32))
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata("llama"), tensors)
    with pytest.raises(
        CheckpointError, match=r"blk\.1\.attn_k\.weight has 14 rows, which 2 heads cannot share"
    ):
        GgufFile(path)
