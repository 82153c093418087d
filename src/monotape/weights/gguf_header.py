"""The header of a GGUF file, parsed strictly and lazily: long arrays are stepped over, never built.

Every count and length is compared with the bytes that are left before anything is looped over or allocated,
so a header that lies costs an error and nothing else. Versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

from monotape.errors import CheckpointError
from monotape.weights.formats import CONVERT, GGUF_MAGIC, shown_bytes
from monotape.weights.mapped import MappedFile

_U32, _U64, _START, _LAST = Struct("<I"), Struct("<Q"), Struct("<4sIQQ"), Struct("<IQ")
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: The scalar value types by their numbers.
_SCALARS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: _U32, 5: Struct("<i"),
    6: Struct("<f"), _BOOL: Struct("<B"), 10: _U64, 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip
_DTYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_KEY_LIMIT = 65_535  # the format's own limit
_TEXT_LIMIT = 1 << 24  # chat templates are the longest texts, some tens of kilobytes
_ENTRY_LIMIT = 1 << 22  # an array in a header belongs to a vocabulary
_PAIR_LIMIT = 1 << 12  # honest files have some dozens
_TENSOR_LIMIT = 1 << 16  # dense models of a thousand layers have fewer
_HEADER_LIMIT = 1 << 26  # bytes of all metadata; the largest vocabularies have a third of it
_SMALLEST_PAIR = 8 + 4 + 1  # an empty key, its type, one byte
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension
#: GGUF's NVFP4 has blocks of another layout than that of safetensors, which has the same name.
_NAMES = {"NVFP4": "gguf-nvfp4"}
#: Types that llama.cpp has removed, by their numbers.
_RETIRED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
_KIND_LIMIT = 1 << 8  # GGUF has some 40 types; a larger number is no type of a later version
_DAMAGED = "The file is damaged or was written by a faulty tool: fetch it again."


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array that was stepped over; gguf_metadata.py reads it when asked."""

    strings: bool
    dtype: str  # NumPy's name for the elements; empty for strings
    offset: int  # of the first element
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, the other way round than in the file
    kind: int  # GGMLQuantizationType
    stored: str  # what `Checkpoint.stored_as` says: its name in lower case
    offset: int  # from the start of the file
    bytes: int


#: Texts stay bytes until they are needed.
Value = int | float | bool | bytes | GgufArray


@dataclass(frozen=True, slots=True)
class GgufHeader:
    version: int
    values: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_header(mapped: MappedFile) -> GgufHeader:
    """The whole header, every offset and size in it checked against the file's length."""
    magic, version, tensor_count, pair_count = mapped.unpack(_START, 0, "the start of the header")
    _require_version(mapped, magic, version)
    reader = _Reader(mapped, _START.size)
    reader.require_count(pair_count, _PAIR_LIMIT, _SMALLEST_PAIR, "metadata entries")
    values: dict[str, Value] = {}
    for _ in range(pair_count):
        key = reader.name(_KEY_LIMIT, "a metadata key")
        if key in values:
            raise reader.fault(f"the metadata key {key} appears twice")
        values[key] = reader.value(key)
        if reader.offset > _HEADER_LIMIT:
            raise reader.fault(f"the metadata has more than the {_HEADER_LIMIT} bytes that make sense")
    reader.require_count(tensor_count, _TENSOR_LIMIT, _SMALLEST_TENSOR, "tensors")
    entries = [reader.tensor() for _ in range(tensor_count)]
    tensors = _placed(mapped, reader, entries, _alignment(reader, values))
    mapped.release(0, reader.offset)
    return GgufHeader(version, values, tensors)


def _require_version(mapped: MappedFile, magic: bytes, version: int) -> None:
    if magic != GGUF_MAGIC:
        raise CheckpointError(
            f"{mapped.path} is no GGUF file: it starts with {shown_bytes(magic)}.", "Check the path."
        )
    if version in (2, 3):
        return
    if version & 0xFFFF == 0 and version != 0:
        raise CheckpointError(
            f"{mapped.path} is a big-endian GGUF file.",
            "Monotape reads little-endian files: convert it again.",
        )
    raise CheckpointError(
        f"{mapped.path} has GGUF version {version}; Monotape reads 2 and 3.", "Convert the model again."
    )


def _alignment(reader: _Reader, values: dict[str, Value]) -> int:
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise reader.fault(f"general.alignment is {alignment!r}, not a multiple of 8 up to 1048576")
    return alignment


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header describes it, before its place is checked."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # from the start of the data


class _Reader:
    """A position in the header that only moves forward and never past the end of the file."""

    __slots__ = ("mapped", "offset")

    def __init__(self, mapped: MappedFile, offset: int) -> None:
        self.mapped = mapped
        self.offset = offset

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.mapped.path}: {what}.", _DAMAGED)

    def require_count(self, count: int, limit: int, smallest: int, what: str) -> None:
        self.require_room(count, smallest, what)
        if count > limit:
            raise self.fault(f"the header claims {count} {what}, more than the {limit} that make sense")

    def require_room(self, count: int, smallest: int, what: str) -> None:
        left = self.mapped.size - self.offset
        if count * smallest > left:
            raise self.fault(f"the header claims {count} {what}, but only {left} bytes are left")

    def number(self, form: Struct, what: str) -> int | float:
        (value,) = self.mapped.unpack(form, self.offset, what)
        self.offset += form.size
        assert isinstance(value, int | float)
        return value

    def count(self, form: Struct, what: str) -> int:
        return int(self.number(form, what))

    def string(self, limit: int, what: str) -> bytes:
        length = self.count(_U64, f"the length of {what}")
        if length > limit:
            raise self.fault(f"{what} claims {length} bytes, more than the {limit} that make sense")
        text = self.mapped.copy(self.offset, length, what)
        self.offset += length
        return text

    def name(self, limit: int, what: str) -> str:
        try:
            return self.string(limit, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} at byte {self.offset} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.count(_U32, f"the type of {key}")
        if kind == _STRING:
            return self.string(_TEXT_LIMIT, key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self.fault(f"{key} has the unknown value type {kind}")
        number = self.number(_SCALARS[kind], key)
        if kind != _BOOL:
            return number
        if number not in (0, 1):
            raise self.fault(f"{key} is a boolean with the value {number}")
        return bool(number)

    def _array(self, key: str) -> GgufArray:
        kind = self.count(_U32, f"the element type of {key}")
        count = self.count(_U64, f"the length of {key}")
        if kind != _STRING and kind not in _SCALARS:
            raise self.fault(f"{key} is an array of the unknown or nested type {kind}")
        if count > _ENTRY_LIMIT:
            raise self.fault(f"{key} claims {count} entries, more than the {_ENTRY_LIMIT} that make sense")
        smallest = 8 if kind == _STRING else _SCALARS[kind].size
        self.require_room(count, smallest, f"entries of {key}")
        start = self.offset
        self.offset = self._after_strings(count, key) if kind == _STRING else start + count * smallest
        return GgufArray(kind == _STRING, _DTYPES.get(kind, ""), start, count, self.offset - start)

    def _after_strings(self, count: int, key: str) -> int:
        """Where `count` strings end. This runs once for every token of the vocabulary, so it is kept bare."""
        buffer, unpack, offset, last = self.mapped.buffer, _U64.unpack_from, self.offset, self.mapped.size - 8
        for index in range(count):
            if offset > last:
                raise self.fault(f"entry {index} of {key} lies past the end of the file")
            offset += 8 + unpack(buffer, offset)[0]
        if offset > self.mapped.size:
            raise self.fault(f"the last entry of {key} lies past the end of the file")
        return offset

    def tensor(self) -> _Entry:
        name = self.name(_KEY_LIMIT, "a tensor name")
        dimensions = self.count(_U32, f"the dimensions of {name}")
        if not 1 <= dimensions <= 4:
            raise self.fault(f"tensor {name} has {dimensions} dimensions, not 1 to 4")
        shape = tuple(self.count(_U64, f"a dimension of {name}") for _ in range(dimensions))
        kind, offset = self.mapped.unpack(_LAST, self.offset, f"type and offset of {name}")
        self.offset += _LAST.size
        return _Entry(name, shape[::-1], kind, offset)


def _placed(
    mapped: MappedFile, reader: _Reader, entries: list[_Entry], alignment: int
) -> dict[str, GgufTensor]:
    """The tensors with absolute offsets, once every one is known to lie in the file and on no other."""
    data = -(-reader.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise reader.fault(f"tensor {entry.name} appears twice")
        if entry.offset % alignment:
            raise reader.fault(f"tensor {entry.name} starts at {entry.offset}, no multiple of {alignment}")
        stored, length = _size_of(reader, entry)
        mapped.require(data + entry.offset, length, f"tensor {entry.name}")
        tensors[entry.name] = GgufTensor(
            entry.name, entry.shape, entry.kind, stored, data + entry.offset, length
        )
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.bytes > after.offset:
            raise reader.fault(f"the tensors {before.name} and {after.name} overlap")
        left = after.offset - before.offset - before.bytes
        if left >= alignment:
            raise reader.fault(
                f"{left} bytes after {before.name} belong to no tensor: its format, {before.stored}, or its shape is "
                "wrong"
            )
    return tensors


def _size_of(reader: _Reader, entry: _Entry) -> tuple[str, int]:
    """The name of the stored format and the tensor's bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(entry.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise _unknown(reader, entry) from None
    if 0 in entry.shape:
        raise reader.fault(f"tensor {entry.name} has the empty shape {list(entry.shape)}")
    if entry.shape[-1] % block:
        row = entry.shape[-1]
        raise reader.fault(
            f"tensor {entry.name} has rows of {row} values, no whole {kind.name} blocks of {block}"
        )
    return _NAMES.get(kind.name, kind.name.lower()), math.prod(entry.shape) // block * block_bytes


def _unknown(reader: _Reader, entry: _Entry) -> CheckpointError:
    """The refusal of a tensor whose type has no size here."""
    if entry.kind >= _KIND_LIMIT:
        return reader.fault(f"tensor {entry.name} has the unknown type {entry.kind}")
    retired = _RETIRED.get(entry.kind)
    reason = (
        "newer than this version of Monotape" if retired is None else f"{retired}, which GGUF no longer has"
    )
    return CheckpointError(
        f"{reader.mapped.path}: tensor {entry.name} has type {entry.kind}, {reason}.", CONVERT
    )
