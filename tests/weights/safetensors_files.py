"""Writes safetensors files byte by byte, so that a test can also write wrong ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Entries = dict[str, dict[str, Any]]


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each value: exact for values that bf16 holds."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def layout(tensors: dict[str, tuple[str, NDArray[Any]]]) -> tuple[Entries, bytes]:
    """Header entries and data of tensors that follow each other without a gap."""
    entries: Entries = {}
    data = b""
    for name, (dtype, values) in tensors.items():
        raw = values.tobytes()
        entries[name] = entry(dtype, list(values.shape), len(data), len(data) + len(raw))
        data += raw
    return entries, data


def encode(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A file with this header; `length` lets the header lie about its own size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_file(path: Path, tensors: dict[str, tuple[str, NDArray[Any]]]) -> Path:
    path.write_bytes(encode(*layout(tensors)))
    return path


def write_folder(folder: Path, tensors: dict[str, tuple[str, NDArray[Any]]], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "test", **config}))
    write_file(folder / "model.safetensors", tensors)
    return folder


def write_shards(folder: Path, shards: list[dict[str, tuple[str, NDArray[Any]]]]) -> Path:
    """A folder with an index and one file a shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
