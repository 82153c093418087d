"""A GGUF file as a checkpoint: Hugging Face names and row order, whatever the file itself uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.checkpoint import Quantised, TextAssets
from monotape.weights.formats import require_readable
from monotape.weights.gguf_blocks import dequantise, integers
from monotape.weights.gguf_config import architecture_of, hugging_face_config, sampling_settings
from monotape.weights.gguf_header import GgufTensor, read_header
from monotape.weights.gguf_matrix import k_matrix, stored_matrix
from monotape.weights.gguf_metadata import Metadata
from monotape.weights.gguf_names import (
    ARCHITECTURES,
    EXPERT,
    GGUF_HEAD,
    ROPE_FACTORS,
    ROPE_LONG,
    ROPE_SHORT,
    hugging_face_name,
    interleaved_part,
)
from monotape.weights.gguf_vocabulary import ending_ids, text_assets
from monotape.weights.mapped import MappedFile
from monotape.weights.raw import RAW_KINDS, RawMatrix
from monotape.weights.tied import HEAD, embedding_copy


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor under its Hugging Face name; `head_dim` is set where rows lie interleaved in each head."""

    tensor: GgufTensor
    head_dim: int | None = None


class GgufFile:
    """A checkpoint (see checkpoint.py) in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._mapped = MappedFile(path)
        header = read_header(self._mapped)
        self._metadata = Metadata(self._mapped, header.values)
        self._require_whole()
        tensors = header.tensors
        self._config = hugging_face_config(
            self.source, self._metadata, tensors, GGUF_HEAD not in tensors, self._vector(tensors)
        )
        if name := self._metadata.text("general.basename") or self._metadata.text("general.name"):
            self._config["_name_or_path"] = name
        self._entries = self._named(tensors)
        if (embedding := embedding_copy(self)) is not None:
            self._drop_copy(embedding)

    @property
    def source(self) -> str:
        return str(self._mapped.path)

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """What generation_config.json would say: the tokens that end a text, and sampling where the file names it."""
        ids = ending_ids(self._metadata, self.text.vocabulary)
        return {**({"eos_token_id": ids} if ids else {}), **sampling_settings(self._metadata)}

    @cached_property
    def text(self) -> TextAssets:
        return text_assets(self.source, self._metadata)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).tensor.shape

    def stored_as(self, name: str) -> str:
        return self._entry(name).tensor.stored

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        entry = self._entry(name)
        tensor = entry.tensor
        require_readable(self.source, name, tensor.stored)
        _require_range(name, tensor.shape, start, stop)
        if start == stop:
            return np.empty((0, *tensor.shape[1:]), np.float32)
        if len(tensor.shape) == 1:
            return self._values(tensor)[_stored_rows(start, stop, entry.head_dim)]
        return dequantise(self._raw_rows(entry, start, stop), tensor.kind).reshape(
            stop - start, *tensor.shape[1:]
        )

    def stored_matrix(self, name: str) -> Quantised | None:
        entry = self._entry(name)
        tensor = entry.tensor
        if len(tensor.shape) != 2:
            return None
        read = partial(self._raw_rows, entry)
        return stored_matrix(name, tensor, read) or k_matrix(name, tensor, read)

    def raw_matrix(self, name: str) -> RawMatrix | None:
        entry = self._entry(name)
        tensor = entry.tensor
        if len(tensor.shape) != 2 or tensor.stored not in RAW_KINDS:
            return None
        return RawMatrix(tensor.stored, self._matrix(tensor), tensor.shape[1], entry.head_dim or 0)

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        entry = self._entry(name)
        _require_range(name, entry.tensor.shape, start, stop)
        if len(entry.tensor.shape) != 2:
            return None
        return integers(self._raw_rows(entry, start, stop), entry.tensor.stored)

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        entry = self._entry(name)
        _require_range(name, entry.tensor.shape, start, stop)
        if entry.tensor.stored not in ("bf16", "f16") or len(entry.tensor.shape) != 2:
            return None
        return np.ascontiguousarray(self._raw_rows(entry, start, stop)).view("<u2")

    def mapped_halves(self, name: str) -> NDArray[np.uint16] | None:
        entry = self._entry(name)
        if entry.head_dim is not None:  # rows lie in another order than they are asked for
            return None
        return self.half_rows(name, 0, entry.tensor.shape[0])

    def release(self, name: str) -> None:
        tensor = self._entry(name).tensor
        self._mapped.release(tensor.offset, tensor.bytes)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.source} has no tensor {name}.", "Was the whole model converted?")
        return self._entries[name]

    def _matrix(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The stored bytes, one row of them per row of the tensor."""
        return self._mapped.array(tensor.offset, tensor.bytes, tensor.name).reshape(tensor.shape[0], -1)

    def _raw_rows(self, entry: _Entry, start: int, stop: int) -> NDArray[np.uint8]:
        return self._matrix(entry.tensor)[_stored_rows(start, stop, entry.head_dim)]

    def _values(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """A whole vector; these are small."""
        raw = self._mapped.array(tensor.offset, tensor.bytes, tensor.name)
        return dequantise(raw[np.newaxis], tensor.kind).reshape(-1)

    def _require_whole(self) -> None:
        parts = self._metadata.integer("split.count") or 1
        if parts > 1:
            raise CheckpointError(
                f"{self.source} is one of {parts} parts of a model.",
                "Join them first with llama-gguf-split --merge.",
            )

    def _vector(self, tensors: Mapping[str, GgufTensor]) -> Any:
        def read(name: str) -> list[float]:
            require_readable(self.source, name, tensors[name].stored)
            return [float(str(value)) for value in self._values(tensors[name])]

        return read

    def _drop_copy(self, embedding: str) -> None:
        """Embedding and head hold the same numbers: the smaller of the two serves as both."""
        head = self._entries.pop(HEAD)
        if head.tensor.bytes < self._entries[embedding].tensor.bytes:
            self._entries[embedding] = head
        self._config["tie_word_embeddings"] = True

    def _named(self, tensors: Mapping[str, GgufTensor]) -> dict[str, _Entry]:
        architecture = architecture_of(self.source, self._metadata)
        known = architecture in ARCHITECTURES
        heads: dict[str | None, Any] = {
            "q": self._config.get("num_attention_heads"),
            "k": self._config.get("num_key_value_heads"),
        }
        entries: dict[str, _Entry] = {}
        for name, tensor in tensors.items():
            if known and name in (ROPE_FACTORS, ROPE_SHORT, ROPE_LONG):
                continue  # already in the config
            part = interleaved_part(architecture, name)
            shared = heads.get(part)  # None for an unsupported mixture of experts, whose config is bare
            head_dim = None if shared is None else self._head_dim(tensor, shared)
            theirs = hugging_face_name(architecture, name)
            if theirs in entries:
                raise CheckpointError(
                    f"{self.source} has {theirs} twice, as {entries[theirs].tensor.name} and as {name}.",
                    "The file was converted by a faulty tool: fetch another.",
                )
            if EXPERT in theirs:
                for expert, own in enumerate(self._split(tensor)):
                    entries[theirs.replace(EXPERT, str(expert))] = _Entry(own)
            else:
                entries[theirs] = _Entry(tensor, head_dim)
        return entries

    def _split(self, tensor: GgufTensor) -> Iterator[GgufTensor]:
        """The experts of a stack: [experts, rows, columns], or [experts, rows] of biases."""
        count = self._config.get("num_experts") or self._config.get("num_local_experts")
        dimensions = 3 if tensor.name.endswith(".weight") else 2
        if len(tensor.shape) != dimensions or tensor.shape[0] != count:
            raise CheckpointError(
                f"{self.source}: {tensor.name} has shape {list(tensor.shape)}, which is no stack of {count or 0} "
                "experts.",
                "The metadata and the weights do not match.",
            )
        size = tensor.bytes // count
        for expert in range(count):
            yield replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, bytes=size)

    def _head_dim(self, tensor: GgufTensor, heads: int) -> int:
        head_dim, rest = divmod(tensor.shape[0], heads)
        if rest or head_dim % 2:
            raise CheckpointError(
                f"{self.source}: {tensor.name} has {tensor.shape[0]} rows, which {heads} heads cannot share.",
                "The metadata and the weights do not match.",
            )
        return head_dim


def _require_range(name: str, shape: tuple[int, ...], start: int, stop: int) -> None:
    assert 0 <= start <= stop <= shape[0], f"rows {start}..{stop} of {name} {shape}"


def _stored_rows(start: int, stop: int, head_dim: int | None) -> slice | NDArray[np.int64]:
    """Where rows start..stop of the Hugging Face order are stored.

    Rotary positions pair value i of a head with value i + head_dim / 2. `llama` files put the two of a pair
    side by side: stored row 2 i + half of a head is row i + half * head_dim / 2.
    """
    if head_dim is None:
        return slice(start, stop)
    rows = np.arange(start, stop)
    within = rows % head_dim
    half, pair = np.divmod(within, head_dim // 2)
    stored: NDArray[np.int64] = rows - within + 2 * pair + half
    return stored
