"""One file with a whole small model: matrices in 4 bits, the embedding in 8, config and texts beside them.

A safetensors file. A tensor `name` of 4 or 8 bits is stored as its codes, `name` (int8, or uint8 with two codes a byte
where they have 4 bits), and `name.scales` (float16), one for each GROUP values in order. Config, tokenizer and other
texts are one more tensor of bytes, compressed; the file's metadata says what each tensor is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError, ResourceError

GROUP = 32
FORMAT = "monotape-packed-1"
TEXTS = "texts"  # the tensor's name
WEIGHTS = "model.safetensors"  # of the folder that it becomes
WIDTHS = (4, 8, 32)  # bits of a value; 32: float32 as it is, for gains
#: By how much the largest value of a group may be clipped so that the others are rounded better.
_CLIPS = tuple(np.float32(1 - 0.04 * step) for step in range(9))
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedModel:
    """What a packed file holds; `texts` are whole files by name (config.json, tokenizer.json, ...)."""

    texts: Mapping[str, str]
    tensors: Mapping[str, Floats]


def quantised(values: Floats, bits: int) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Codes and scales of a tensor whose size is a multiple of GROUP: for each group the clip with the least error."""
    assert bits in (4, 8) and values.size % GROUP == 0
    groups = values.astype(np.float32).reshape(-1, GROUP)
    top = 2 ** (bits - 1) - 1
    largest = np.abs(groups).max(1, keepdims=True)
    best_error = np.full((len(groups), 1), np.inf, np.float32)
    codes, scales = np.zeros(groups.shape, np.int8), np.zeros((len(groups), 1), np.float16)
    for clip in _CLIPS if bits == 4 else _CLIPS[:1]:
        scale = (largest * clip / top).astype(np.float16)
        used = np.where(scale > 0, scale.astype(np.float32), 1)
        tried = np.clip(np.rint(groups / used), -top - 1, top).astype(np.int8)
        error = np.square(tried * scale.astype(np.float32) - groups).sum(1, keepdims=True)
        better = error < best_error
        codes, scales = np.where(better, tried, codes), np.where(better, scale, scales)
        best_error = np.minimum(error, best_error)
    if bits == 8:
        return codes.reshape(values.shape), scales[:, 0]
    pairs = (codes.reshape(-1, 2) & 15).astype(np.uint8)
    return pairs[:, 0] | pairs[:, 1] << 4, scales[:, 0]


def dequantised(
    codes: NDArray[Any], scales: NDArray[np.float16], bits: int, shape: tuple[int, ...]
) -> Floats:
    if bits == 4:
        both = np.stack((codes & 15, codes >> 4), -1).astype(np.int8)
        codes = np.where(both > 7, both - 16, both)
    groups = codes.reshape(-1, GROUP).astype(np.float32) * scales.astype(np.float32)[:, None]
    return groups.reshape(shape)


def write(path: Path, model: PackedModel, bits: Mapping[str, int]) -> None:
    """Packs every tensor into its number of bits."""
    from safetensors.numpy import save_file

    stored: dict[str, NDArray[Any]] = {}
    kinds = {}
    for name, values in model.tensors.items():
        kinds[name] = {"bits": bits[name], "shape": list(values.shape)}
        if bits[name] == 32:
            stored[name] = np.ascontiguousarray(values, np.float32)
        else:
            stored[name], stored[f"{name}.scales"] = map(np.ascontiguousarray, quantised(values, bits[name]))
    stored[TEXTS] = np.frombuffer(zlib.compress(json.dumps(dict(model.texts)).encode(), 9), np.uint8)
    metadata = {"format": FORMAT, "tensors": json.dumps(kinds)}
    save_file(stored, str(path), metadata=metadata)


def read(path: Path) -> PackedModel:
    """The texts, and every tensor as float32."""
    with _opened(path) as (file, texts, kinds):
        return PackedModel(texts, {name: _tensor(file, name, kind) for name, kind in kinds.items()})


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    """The file, its texts, and what each tensor is."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
            texts = json.loads(zlib.decompress(file.get_tensor(TEXTS).tobytes()))
            yield file, texts, json.loads(metadata["tensors"])
    except (OSError, SafetensorError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a packed model: {error}.", "Install the package again."
        ) from None


def _tensor(file: Any, name: str, kind: Mapping[str, Any]) -> Floats:
    bits, shape = kind["bits"], tuple(kind["shape"])
    codes = file.get_tensor(name)
    if bits not in WIDTHS or codes.nbytes * 8 != bits * int(np.prod(shape)):
        raise ValueError(f"{name} has {codes.nbytes} bytes for {shape} values of {bits} bits")
    if bits == 32:
        return np.asarray(codes, np.float32).reshape(shape)
    scales = file.get_tensor(f"{name}.scales")
    if scales.size * GROUP != int(np.prod(shape)):
        raise ValueError(f"{name} has {scales.size} scales for {shape} values")
    return dequantised(codes, scales, bits, shape)


def unpacked(path: Path, cache: Path) -> Path:
    """A folder in `cache` for the engine: the packed model with bf16 weights. Made anew where a file is damaged."""
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    folder = cache / f"embedded-{digest}"
    if _is_whole(folder, path):
        return folder
    model = read(path)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".embedded-", dir=cache))
        try:
            for name, text in model.texts.items():
                (scratch / Path(name).name).write_bytes(text.encode())
            _write_bf16(scratch / WEIGHTS, model.tensors)
            # File by file, and nothing is removed: another process may be reading here, or doing the same. The bytes
            # are the same from every process.
            folder.mkdir(exist_ok=True)
            for file in list(scratch.iterdir()):
                os.replace(file, folder / file.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            f"The embedded model cannot be unpacked into {cache}: {error.strerror}.",
            "It needs 70 MB there; MONOTAPE_CACHE names another place.",
        ) from None
    return folder


def _is_whole(folder: Path, path: Path) -> bool:
    """Whether every file of the folder has its full size: a power cut can leave one short, or without a byte."""
    if not folder.is_dir():
        return False
    with _opened(path) as (_, texts, kinds):
        header, end = _bf16_header({name: kind["shape"] for name, kind in kinds.items()})
        sizes = {Path(name).name: len(text.encode()) for name, text in texts.items()}
    sizes[WEIGHTS] = len(header) + end
    return all(_has_size(folder / name, size) for name, size in sizes.items())


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:  # it is not there, or no longer
        return False


def _write_bf16(path: Path, tensors: Mapping[str, Floats]) -> None:
    """Rounds to the nearest bf16. NumPy has no such type, so the file's header is written here."""
    header, _ = _bf16_header({name: values.shape for name, values in tensors.items()})
    with path.open("wb") as out:
        out.write(header)
        for values in tensors.values():
            words = values.astype(np.float32).view(np.uint32)
            out.write(((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2").tobytes())


def _bf16_header(shapes: Mapping[str, Sequence[int]]) -> tuple[bytes, int]:
    """What a safetensors file begins with, and the bytes of values behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, at
