"""Hugging Face folders: exact rows, shards, text files, and headers that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from monotape.errors import CheckpointError
from monotape.weights import safetensors_header
from monotape.weights.safetensors_folder import SafetensorsFolder
from weights.safetensors_files import (
    encode,
    entry,
    layout,
    to_bf16,
    write_file,
    write_folder,
    write_index,
    write_shards,
)

RNG = np.random.default_rng(11)
MATRIX = RNG.standard_normal((7, 5)).astype(np.float32)
VECTOR = RNG.standard_normal(13).astype(np.float32)


def _folder(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    save_file({"a": MATRIX, "b": VECTOR.astype(np.float16)}, tmp_path / "model.safetensors", {"format": "pt"})
    opened = SafetensorsFolder(tmp_path)
    assert opened.source == str(tmp_path)
    assert opened.config == {"hidden_size": 5}
    assert opened.names == {"a", "b"}
    assert opened.shape("a") == (7, 5)
    assert (opened.stored_as("a"), opened.stored_as("b")) == ("f32", "f16")
    assert np.array_equal(opened.rows("a", 0, 7), MATRIX)
    assert np.array_equal(opened.rows("b", 4, 9), VECTOR.astype(np.float16)[4:9].astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "exact", "raw"),
    [
        ("F32", MATRIX, MATRIX),
        ("F16", MATRIX.astype(np.float16).astype(np.float32), MATRIX.astype(np.float16)),
        ("BF16", (to_bf16(MATRIX).astype(np.uint32) << 16).view(np.float32), to_bf16(MATRIX)),
    ],
)
@pytest.mark.parametrize(("start", "stop"), [(0, 7), (2, 3), (6, 7), (3, 3)])
def test_rows_are_exact(tmp_path: Path, dtype: str, exact: Any, raw: Any, start: int, stop: int) -> None:
    # The vector in front leaves the matrix at an odd offset, as files may.
    odd = np.arange(3, dtype=np.uint8)
    opened = SafetensorsFolder(write_folder(tmp_path, {"odd": ("U8", odd), "m": (dtype, raw)}))
    rows = opened.rows("m", start, stop)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, exact[start:stop])
    assert rows.flags.writeable, "rows must not be a view of the file"
    assert opened.integer_rows("m", start, stop) is None
    halves = opened.half_rows("m", start, stop)
    whole = opened.mapped_halves("m")
    if dtype == "F32":
        assert halves is whole is None
    else:
        assert halves is not None and whole is not None
        assert np.array_equal(halves, raw[start:stop].view(np.uint16))
        assert np.array_equal(whole, raw.view(np.uint16)) and not whole.flags.owndata


def test_special_values_survive(tmp_path: Path) -> None:
    bits = np.array([0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x0001, 0x8000], np.uint16)
    opened = SafetensorsFolder(write_folder(tmp_path, {"v": ("BF16", bits)}))
    assert np.array_equal(opened.rows("v", 0, 6).view(np.uint32), bits.astype(np.uint32) << 16)
    half = np.array([0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x0001], np.uint16)
    opened = SafetensorsFolder(write_folder(tmp_path / "half", {"v": ("F16", half)}))
    assert np.array_equal(opened.rows("v", 0, 5), [np.inf, -np.inf, np.nan, np.nan, 2.0**-24], equal_nan=True)


def test_release_keeps_the_values(tmp_path: Path) -> None:
    opened = SafetensorsFolder(write_folder(tmp_path, {"m": ("F32", MATRIX)}))
    before = opened.rows("m", 0, 7)
    opened.release("m")
    assert np.array_equal(before, MATRIX)
    assert np.array_equal(opened.rows("m", 0, 7), MATRIX)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    shards = [{"a": ("F32", MATRIX)}, {"b": ("F32", VECTOR), "c": ("BF16", to_bf16(MATRIX))}]
    opened = SafetensorsFolder(write_shards(tmp_path, shards))
    assert opened.names == {"a", "b", "c"}
    assert np.array_equal(opened.rows("a", 1, 4), MATRIX[1:4])
    assert np.array_equal(opened.rows("b", 1, 4), VECTOR[1:4])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": ("F32", MATRIX)}, {"b": ("F32", VECTOR)}])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing, first model-00002-of-00002"):
        SafetensorsFolder(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": ("F32", MATRIX)}, {"b": ("F32", VECTOR)}])
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00002\.safetensors: tensor b lies at bytes"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    twice = ("F32", MATRIX)
    write_shards(tmp_path, [{"a": twice, "c": twice}, {"b": ("F32", VECTOR), "a": twice}])
    with pytest.raises(CheckpointError, match=r"tensor a is in model-00001.* and in model-00002"):
        SafetensorsFolder(tmp_path)


def test_an_index_that_is_wrong_about_a_tensor_is_refused(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    for weight_map in ({"a": second, "b": first}, {"a": first, "b": second, "ghost": first}):
        write_shards(tmp_path, [{"a": ("F32", MATRIX)}, {"b": ("F32", VECTOR)}])
        write_index(tmp_path, weight_map)
        with pytest.raises(CheckpointError, match=r"says that tensor .* but it is not"):
            SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "x.bin", 3, ".."]
)
def test_an_index_cannot_point_elsewhere(tmp_path: Path, file: Any) -> None:
    write_file(tmp_path / "x.safetensors", {"a": ("F32", MATRIX)})
    folder = tmp_path / "model"
    write_shards(folder, [{"a": ("F32", MATRIX)}])
    write_index(folder, {"a": file})
    with pytest.raises(CheckpointError, match="no file beside it"):
        SafetensorsFolder(folder)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": ("F32", MATRIX)}])
    write_index(tmp_path, {})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        SafetensorsFolder(tmp_path)


def test_other_dtypes_are_refused_by_name_when_asked_for(tmp_path: Path) -> None:
    tensors = {"q": ("F8_E4M3", np.zeros((3, 3), np.uint8)), "i": ("I64", np.zeros(3, np.int64))}
    opened = SafetensorsFolder(write_folder(tmp_path, tensors))
    assert opened.stored_as("q") == "f8_e4m3"
    with pytest.raises(CheckpointError, match=r"tensor q is stored as f8_e4m3.*bf16"):
        opened.rows("q", 0, 1)
    with pytest.raises(CheckpointError, match="stored as i64"):
        opened.rows("i", 0, 1)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    opened = SafetensorsFolder(write_folder(tmp_path, {"m": ("F32", MATRIX)}))
    for ask in (opened.shape, opened.stored_as, opened.release):
        with pytest.raises(CheckpointError, match="has no tensor ghost"):
            ask("ghost")


ENTRIES, DATA = layout({"a": ("F32", MATRIX), "b": ("F32", VECTOR)})
END = len(DATA)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"1234567", "the length of the header"),
        (encode(ENTRIES, DATA, length=2**63), "more than the 30000000 allowed"),
        (encode(ENTRIES, DATA, length=2**64 - 1), "more than the 30000000 allowed"),
        (encode(ENTRIES, DATA, length=29_000_000), "the header lies at bytes"),
        (encode(b"{", b""), "not valid JSON"),
        (encode(b"\xff\xfe{}", b""), "not valid JSON"),
        (encode(b"[]", b""), "no JSON object"),
        (encode(b'{"a": {"dtype": "F32"' + b"[" * 50_000, b""), "not valid JSON"),
        (encode(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b""), "nested too deeply"),
        (encode(b'{"a": 1, "a": 2}', b""), "key 'a' appears twice"),
        (encode(b'{"a": NaN}', b""), "NaN is no JSON number"),
        (encode({"a": 5}, b""), "tensor a needs exactly"),
        (encode({"a": entry("F32", [1], 0, 4) | {"extra": 1}}, b"1234"), "tensor a needs exactly"),
        (encode({"a": entry(5, [1], 0, 4)}, b"1234"), "dtype that is no text"),  # type: ignore[arg-type]
        (encode({"a": entry("F32", [1.0], 0, 4)}, b"1234"), "shape that is no list"),  # type: ignore[list-item]
        (encode({"a": entry("F32", [True], 0, 4)}, b"1234"), "shape that is no list"),
        (encode({"a": entry("F32", [-1], 0, 4)}, b"1234"), "shape that is no list"),
        (encode({"a": entry("F32", [1], 4, 0)}, b"1234"), "no pair"),
        (encode({"a": entry("F32", [1], -4, 0)}, b"1234"), "no pair"),
        (encode({"a": entry("F32", [2], 0, 8)}, b"1234"), "tensor a lies at bytes"),
        (encode({"a": entry("F32", [1], 2**64, 2**64 + 4)}, b"1234"), "tensor a lies at bytes"),
        (encode({"a": entry("F32", [2**62, 4], 0, 4)}, b"1234"), "but its data_offsets span 4 bytes"),
        (encode({"a": entry("F16", [1], 0, 4)}, b"1234"), "2 bytes, but its data_offsets span 4"),
        (encode({**ENTRIES, "b": entry("F32", [13], 4, 56)}, DATA), "overlaps"),
        (encode({"a": ENTRIES["a"], "b": ENTRIES["a"]}, DATA[: 7 * 5 * 4]), "overlaps"),
        (encode({"b": ENTRIES["b"]}, DATA), "leaves a gap"),
        (encode(ENTRIES, DATA + b"!"), "1 bytes after the last tensor"),
        (encode(ENTRIES, DATA[:-1]), "tensor b lies at bytes"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFolder(_folder(tmp_path, content))
    assert str(tmp_path) in str(caught.value)


def test_metadata_and_padding_are_fine(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, **ENTRIES}).encode() + b"   "
    opened = SafetensorsFolder(_folder(tmp_path, encode(header, DATA)))
    assert opened.names == {"a", "b"}


def test_config_must_be_there_and_be_an_object(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"m": ("F32", MATRIX)})
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        SafetensorsFolder(tmp_path)


def test_text_files_are_found(tmp_path: Path) -> None:
    opened = SafetensorsFolder(write_folder(tmp_path, {"m": ("F32", MATRIX)}))
    assert opened.generation_config == {}
    assert opened.text.tokenizer_json is None
    assert opened.text.tokenizer_config == {}
    assert opened.text.chat_template is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "one", "add_bos_token": true}')
    opened = SafetensorsFolder(tmp_path)
    assert opened.generation_config == {"eos_token_id": [1, 2]}
    assert opened.text.tokenizer_json == tmp_path / "tokenizer.json"
    assert opened.text.tokenizer_config == {"chat_template": "one", "add_bos_token": True}
    assert opened.text.chat_template == "one"
    (tmp_path / "chat_template.jinja").write_text("two é", "utf-8")
    assert SafetensorsFolder(tmp_path).text.chat_template == "two é"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="must be UTF-8"):
        _ = SafetensorsFolder(tmp_path).text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}], "y"),
        ([{"name": "tool_use", "template": "x"}], None),
        ([], None),
        (None, None),
    ],
)
def test_named_chat_templates(tmp_path: Path, template: Any, expected: str | None) -> None:
    write_folder(tmp_path, {"m": ("F32", MATRIX)})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert SafetensorsFolder(tmp_path).text.chat_template == expected


@pytest.mark.parametrize("template", [5, {"a": 1}, [{"name": "default", "template": 7}]])
def test_a_chat_template_of_another_type_is_refused(tmp_path: Path, template: Any) -> None:
    write_folder(tmp_path, {"m": ("F32", MATRIX)})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match="chat_template is neither"):
        _ = SafetensorsFolder(tmp_path).text


def test_an_unsharded_mixture_of_experts_in_gptq_is_read(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: four tensors for each of three matrices of 128 experts in 48 layers, here without numbers."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{end}"
        for layer in range(48)
        for expert in range(128)
        for part in ("gate", "up", "down")
        for end in ("qweight", "qzeros", "scales", "g_idx")
    ]
    content = encode(dict.fromkeys(names, entry("I32", [0], 0, 0)), b"")
    assert len(SafetensorsFolder(_folder(tmp_path, content)).names) == 73_728


def test_more_tensors_than_make_sense_are_refused_before_they_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs tens of microseconds: a header of 900,000 empty ones took a minute to refuse."""
    looked: list[str] = []
    monkeypatch.setattr(safetensors_header, "_tensor", lambda mapped, data, name, entry: looked.append(name))
    monkeypatch.setattr(safetensors_header, "TENSOR_LIMIT", 101)
    content = encode({f"t{index}": entry("F32", [0], 0, 0) for index in range(102)}, b"")
    with pytest.raises(CheckpointError, match="has 102 tensors; at most 101 make sense"):
        SafetensorsFolder(_folder(tmp_path, content))
    assert not looked


def test_a_header_of_900000_empty_tensors_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_header, "parse_object", lambda text, where: pytest.fail("it was parsed"))
    one = b'"t%06d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    content = encode(b"{" + b",".join(one % index for index in range(900_000)) + b"}", b"")
    with pytest.raises(CheckpointError, match=r"the header claims \d+ bytes, more than the 30000000 allowed"):
        SafetensorsFolder(_folder(tmp_path, content))


def test_an_index_of_more_tensors_than_make_sense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_index(tmp_path, {f"t{index}": "a.safetensors" for index in range((1 << 18) + 1)})
    with pytest.raises(CheckpointError, match="lists 262145 tensors; at most 262144 make sense"):
        SafetensorsFolder(tmp_path)


def test_a_json_file_of_more_bytes_than_make_sense_is_refused_unread(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": ("F32", MATRIX)})
    with (folder / "config.json").open("r+b") as file:
        file.truncate(40_000_000)
    with pytest.raises(CheckpointError, match=r"config\.json has 40000000 bytes"):
        SafetensorsFolder(folder)
