"""weights/gguf_header.py and gguf_metadata.py: every value type, and every lie a header can tell."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from monotape.errors import CheckpointError
from monotape.weights.gguf_header import GgufArray, read_header
from monotape.weights.gguf_metadata import Metadata
from monotape.weights.mapped import MappedFile
from weights.gguf_files import VOCAB, model_values, write_gguf, write_model


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def build(pairs: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: int = 64, **start: Any) -> bytes:
    """A GGUF file by hand; `start` overrides what its first 24 bytes say."""
    given = {"magic": b"GGUF", "version": 3, "tensor_count": len(tensors), "pair_count": len(pairs)} | start
    head = struct.pack("<4sIQQ", given["magic"], given["version"], given["tensor_count"], given["pair_count"])
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def parse(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_header(MappedFile(path))


U32 = struct.Struct("<I")


def test_every_value_type_is_read(tmp_path: Path) -> None:
    values = [
        pair("u8", 0, b"\xff"),
        pair("i8", 1, b"\xff"),
        pair("u16", 2, b"\xfe\xff"),
        pair("i16", 3, b"\xfe\xff"),
        pair("u32", 4, b"\xfd\xff\xff\xff"),
        pair("i32", 5, b"\xfd\xff\xff\xff"),
        pair("f32", 6, struct.pack("<f", 0.1)),
        pair("bool", 7, b"\x01"),
        pair("text", 8, text("né")),
        pair("array", 9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", -1, 2, -3)),
        pair("texts", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("ccc")),
        pair("u64", 10, b"\xff" * 8),
        pair("i64", 11, b"\xff" * 8),
        pair("f64", 12, struct.pack("<d", 0.1)),
    ]
    path = tmp_path / "x.gguf"
    path.write_bytes(build(values))
    mapped = MappedFile(path)
    header = read_header(mapped)
    plain = {key: value for key, value in header.values.items() if not isinstance(value, GgufArray)}
    assert plain == {
        "u8": 255, "i8": -1, "u16": 65534, "i16": -2, "u32": 2**32 - 3, "i32": -3, "f32": np.float32(0.1),
        "bool": True, "text": "né".encode(), "u64": 2**64 - 1, "i64": -1, "f64": 0.1,
    }  # fmt: skip
    metadata = Metadata(mapped, header.values)
    assert metadata.numbers("array").tolist() == [-1, 2, -3]
    assert metadata.texts("texts") == ("a", "", "ccc")
    assert metadata.text("text") == "né"
    assert metadata.number("f32") == 0.1, "the shortest decimal of the float32"
    assert metadata.flag("bool", False)
    assert (metadata.integer("i64"), metadata.integer("nothing"), metadata.integer("nothing", 7)) == (
        -1,
        None,
        7,
    )
    assert (metadata.count("texts"), metadata.count("nothing")) == (3, 0)
    assert metadata.numbers("nothing").tolist() == []
    assert metadata.texts("nothing") == ()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 64, 256])
def test_tensors_lie_where_the_writer_put_them(tmp_path: Path, version: int, alignment: int | None) -> None:
    values = model_values("qwen2")
    path = write_model(tmp_path / "x.gguf", "qwen2", values, alignment=alignment)
    content = bytearray(path.read_bytes())
    content[4:8] = U32.pack(version)
    path.write_bytes(content)
    mapped = MappedFile(path)
    header = read_header(mapped)
    assert header.version == version
    assert header.tensors.keys() == values.keys()
    for name, found in header.tensors.items():
        assert found.shape == values[name].shape
        assert found.offset % (alignment or 32) == 0
        raw = mapped.array(found.offset, found.bytes, name).view(np.float32)
        assert np.array_equal(raw.reshape(found.shape), values[name]), name


def test_sizes_of_quantised_tensors(tmp_path: Path) -> None:
    kinds = {"blk.0.ffn_up.weight": Kind.Q5_0, "blk.1.ffn_up.weight": Kind.Q4_1}
    header = read_header(MappedFile(write_model(tmp_path / "x.gguf", "qwen2", kinds=kinds)))
    assert header.tensors["blk.0.ffn_up.weight"].bytes == 160 * 96 // 32 * 22
    assert header.tensors["blk.1.ffn_up.weight"].bytes == 160 * 96 // 32 * 20
    assert header.tensors["blk.1.ffn_up.weight"].stored == "q4_1"


def test_a_vocabulary_is_stepped_over_not_built(tmp_path: Path) -> None:
    header = read_header(MappedFile(write_model(tmp_path / "x.gguf")))
    tokens = header.values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert (tokens.strings, tokens.count) == (True, VOCAB)


GOOD = tensor("a", [8])
STRINGS = struct.pack("<IQ", 8, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF", "the start of the header"),
        (build(magic=b"GGML"), "is no GGUF file"),
        (build(version=1), "version 1; Monotape reads 2 and 3"),
        (build(version=4), "version 4"),
        (build(version=3 << 24), "big-endian"),
        (build(pair_count=2**64 - 1), "claims 18446744073709551615 metadata entries, but only"),
        (build(tensor_count=2**61), "claims 2305843009213693952 tensors, but only"),
        (build([struct.pack("<Q", 2**63)]), "metadata key claims 9223372036854775808 bytes"),
        (build([pair(b"\xff", 4, U32.pack(1))]), "a metadata key .* is not UTF-8"),
        (build([pair("k", 4, U32.pack(1))] * 2), "metadata key k appears twice"),
        (build([pair("k", 13, b"")]), "unknown value type 13"),
        (build([pair("k", 7, b"\x02")]), "boolean with the value 2"),
        (build([pair("k", 8, struct.pack("<Q", 2**40))]), "k claims 1099511627776 bytes"),
        (build([pair("k", 8, struct.pack("<Q", 1000))]), "k lies at bytes"),
        (build([pair("k", 9, struct.pack("<IQ", 9, 1))]), "unknown or nested type 9"),
        (build([pair("k", 9, struct.pack("<IQ", 4, 2**62))]), "claims 4611686018427387904 entries"),
        (build([pair("k", 9, struct.pack("<IQ", 4, 1000))]), "claims 1000 entries of k, but only"),
        (build([pair("k", 9, STRINGS + struct.pack("<Q", 2**63))]), "entry 1 of k lies past the end"),
        (build([pair("k", 9, STRINGS + text("a") + struct.pack("<Q", 2**63))]), "last entry of k lies past"),
        (build([pair("general.alignment", 4, U32.pack(0))]), "general.alignment is 0"),
        (build([pair("general.alignment", 4, U32.pack(12))]), "general.alignment is 12"),
        (build([pair("general.alignment", 7, b"\x01")]), "general.alignment is True"),
        (build(tensor_count=1, data=7), "claims 1 tensors, but only"),
        (build([], [tensor("a", [])], data=320), "0 dimensions"),
        (build([], [tensor("a", [1] * 5)], data=320), "5 dimensions"),
        (build([], [tensor("a", [8, 0])]), "empty shape"),
        (build([], [tensor("a", [8], kind=2**31)]), "unknown type 2147483648"),
        (build([], [tensor("a", [33], kind=8)]), "rows of 33 values, no whole Q8_0 blocks of 32"),
        (build([], [tensor("a", [17])]), "tensor a lies at bytes"),
        (build([], [tensor("a", [2**62, 2**62])]), "tensor a lies at bytes"),
        (build([], [tensor("a", [8], offset=2**64 - 32)]), "tensor a lies at bytes"),
        (build([], [tensor("a", [8], offset=4)]), "starts at 4, no multiple of 32"),
        (build([], [GOOD, GOOD]), "tensor a appears twice"),
        (build([], [tensor("a", [9]), tensor("b", [1], offset=32)]), "tensors a and b overlap"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(tmp_path, content)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (4, "Q4_2, which GGUF no longer has"), (5, "Q4_3, which"), (31, "Q4_0_4_4, which"), (32, "Q4_0_4_8, which"),
        (33, "Q4_0_8_8, which"), (36, "IQ4_NL_4_4, which"), (37, "IQ4_NL_4_8, which"), (38, "IQ4_NL_8_8, which"),
        (99, "newer than this version of Monotape"), (255, "newer than this version of Monotape"),
    ],
)  # fmt: skip
def test_a_type_that_was_removed_or_is_newer_says_so(tmp_path: Path, kind: int, reason: str) -> None:
    """Such a file is no more damaged than one in a format that is not read, and the way out is the same."""
    with pytest.raises(CheckpointError, match=rf"tensor a has type {kind}, {reason}.*\.") as caught:
        parse(tmp_path, build([], [tensor("a", [32], kind=kind)]))
    assert "x.gguf" in caught.value.message and "\n" not in caught.value.message
    assert "mxfp4" in caught.value.hint and "fetch" not in caught.value.hint


def test_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    whole = build(
        [pair("k", 8, text("value")), pair("n", 9, STRINGS + text("a") + text("b"))], [GOOD], data=32
    )
    assert parse(tmp_path, whole).tensors.keys() == {"a"}
    for length in range(1, len(whole)):
        with pytest.raises(CheckpointError):
            parse(tmp_path, whole[:length])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.integer("text"), "text is not an integer"),
        (lambda m: m.integer("flag"), "flag is not an integer"),
        (lambda m: m.integer("mixed"), "mixed differs from layer to layer"),
        (lambda m: m.number("text"), "text is not a number"),
        (lambda m: m.flag("number", True), "number is not a boolean"),
        (lambda m: m.text("number"), "number is not a text"),
        (lambda m: m.text("bad"), "bad is not UTF-8 text"),
        (lambda m: m.texts("mixed"), "mixed is not an array of texts"),
        (lambda m: m.texts("odd"), "entry 1 of odd is not UTF-8"),
        (lambda m: m.numbers("odd"), "odd is not an array of numbers"),
        (lambda m: m.count("number"), "number is not an array"),
    ],
)
def test_metadata_of_the_wrong_type_is_named(tmp_path: Path, ask: Any, message: str) -> None:
    path = tmp_path / "x.gguf"
    pairs = [
        pair("text", 8, text("x")),
        pair("bad", 8, text(b"\xe9")),
        pair("flag", 7, b"\x01"),
        pair("number", 4, U32.pack(5)),
        pair("mixed", 9, struct.pack("<IQII", 4, 2, 3, 4)),
        pair("equal", 9, struct.pack("<IQII", 4, 2, 3, 3)),
        pair("odd", 9, STRINGS + text("a") + text(b"\xe9")),
    ]
    path.write_bytes(build(pairs))
    mapped = MappedFile(path)
    metadata = Metadata(mapped, read_header(mapped).values)
    assert metadata.integer("equal") == 3
    with pytest.raises(CheckpointError, match=message):
        ask(metadata)


def test_a_file_without_tensors_parses(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", {"llama.block_count": 3}, {})
    assert read_header(MappedFile(path)).tensors == {}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (build([pair(f"k{index}", 0, b"\1") for index in range(4097)]), "4097 metadata entries, more than the 4096"),
        (build(tensors=[tensor(f"t{i}", [1]) for i in range(65537)]), "65537 tensors, more than the 65536"),
        (build([pair("k", 9, struct.pack("<IQ", 0, 5_000_000))], data=5_000_000), "5000000 entries, more than"),
        (
            build([pair(f"k{i}", 9, struct.pack("<IQ", 12, 4_000_000) + bytes(32_000_000)) for i in range(3)]),
            "the metadata has more than the 67108864 bytes that make sense",
        ),
    ],
    ids=["metadata", "tensors", "array", "bytes"],
)  # fmt: skip
def test_more_than_makes_sense_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    """Each entry costs microseconds, and a file has room for millions."""
    with pytest.raises(CheckpointError, match=complaint):
        parse(tmp_path, content)
