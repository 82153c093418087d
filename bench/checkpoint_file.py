"""Writes a named shape as a real checkpoint, for benchmarks that must start from files: a folder of safetensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from shapes import RandomCheckpoint

_ROWS = 4096  # written at a time


def write_checkpoint(shape: str, folder: Path) -> Path:
    """config.json and model.safetensors with random bf16 weights; the file ends up in the page cache."""
    source = RandomCheckpoint(shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(source.config)))
    header, offset = {}, 0
    for name in sorted(source.names):
        size = 2 * int(np.prod(source.shape(name)))
        header[name] = {"dtype": "BF16", "shape": source.shape(name), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(source.names):
            for start in range(0, source.shape(name)[0], _ROWS):
                stop = min(start + _ROWS, source.shape(name)[0])
                file.write(_bf16(source, name, start, stop))
    return folder


def _bf16(source: RandomCheckpoint, name: str, start: int, stop: int) -> bytes:
    halves = source.half_rows(name, start, stop)
    if halves is None:
        halves = (source.rows(name, start, stop).view(np.uint32) >> 16).astype(np.uint16)
    return halves.tobytes()
