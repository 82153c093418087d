"""The header of a safetensors file, parsed strictly: what it says is checked before it is believed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from struct import Struct
from typing import Any

from monotape.errors import CheckpointError
from monotape.weights.json_file import JSON_BYTES_LIMIT, parse_object
from monotape.weights.mapped import MappedFile

_LENGTH = Struct("<Q")
#: Tensors of a file, and of a model in all its files. Mixtures of experts in GPTQ have the most, four a matrix: 73,728
#: of Qwen3-30B's experts, 144,384 of Qwen3-235B's, in one file where nothing was sharded. With such names a header has
#: no more than this within JSON_BYTES_LIMIT, so the limit is for shorter ones. Each costs tens of microseconds, and all
#: of them together a third of a gigabyte of memory.
TENSOR_LIMIT = 1 << 18
_DAMAGED = "The file is damaged or was not written by safetensors: fetch it again."

#: Bits per value of each dtype name. A dtype that is not listed is refused when its tensor is asked for.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in a mapped file."""

    shape: tuple[int, ...]
    stored: str  # "f32", "bf16", ...
    offset: int  # from the start of the file
    bytes: int


def read_header(mapped: MappedFile) -> dict[str, StoredTensor]:
    """Every tensor of the file, with offsets, sizes and shapes that are known to fit together."""
    (length,) = mapped.unpack(_LENGTH, 0, "the length of the header")
    if length > JSON_BYTES_LIMIT:
        raise CheckpointError(
            f"{mapped.path}: the header claims {length} bytes, more than the {JSON_BYTES_LIMIT} allowed.",
            _DAMAGED,
        )
    header = parse_object(mapped.copy(_LENGTH.size, length, "the header"), f"The header of {mapped.path}")
    header.pop("__metadata__", None)
    if len(header) > TENSOR_LIMIT:
        raise CheckpointError(
            f"{mapped.path} has {len(header)} tensors; at most {TENSOR_LIMIT} make sense.", _DAMAGED
        )
    data = _LENGTH.size + length
    tensors = {name: _tensor(mapped, data, name, entry) for name, entry in header.items()}
    _require_gapless(mapped, data, tensors)
    mapped.release(0, data)
    return tensors


def _tensor(mapped: MappedFile, data: int, name: str, entry: Any) -> StoredTensor:
    where = f"{mapped.path}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs exactly dtype, shape and data_offsets.", _DAMAGED)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where} has a dtype that is no text.", _DAMAGED)
    if not _counts(shape):
        raise CheckpointError(f"{where} has a shape that is no list of sizes.", _DAMAGED)
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets that are no pair (begin, end).", _DAMAGED)
    length = offsets[1] - offsets[0]
    mapped.require(data + offsets[0], length, f"tensor {name}")
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != length * 8:
        raise CheckpointError(
            f"{where} has shape {shape} of {dtype}, {math.prod(shape) * _BITS[dtype] // 8} bytes, "
            f"but its data_offsets span {length} bytes.",
            _DAMAGED,
        )
    return StoredTensor(tuple(shape), dtype.lower(), data + offsets[0], length)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _require_gapless(mapped: MappedFile, data: int, tensors: dict[str, StoredTensor]) -> None:
    """The format wants every byte after the header to belong to exactly one tensor."""
    end, before = data, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(f"{mapped.path}: tensor {name} {fault} {before}.", _DAMAGED)
        end, before = tensor.offset + tensor.bytes, f"tensor {name}"
    if end != mapped.size:
        raise CheckpointError(
            f"{mapped.path}: {mapped.size - end} bytes after the last tensor belong to none.", _DAMAGED
        )
