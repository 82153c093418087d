"""A Hugging Face folder: config.json, safetensors in one file or many, and the tokenizer's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.checkpoint import TextAssets
from monotape.weights.formats import require_readable
from monotape.weights.json_file import read_object
from monotape.weights.mapped import MappedFile
from monotape.weights.raw import RawMatrix
from monotape.weights.safetensors_header import TENSOR_LIMIT, StoredTensor, read_header
from monotape.weights.tied import HEAD, embedding_copy, untied

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"  # where it lies, transformers loads an adapter on top of a model


class SafetensorsFolder:
    """A checkpoint (see checkpoint.py) in the layout that `save_pretrained` writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = folder / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{folder} has no config.json.", "A Hugging Face model folder needs one.")
        if (folder / ADAPTER_FILE).is_file():
            raise CheckpointError(
                f"{folder} has an {ADAPTER_FILE}: its weights are to be changed by an adapter, which is not supported.",
                "Merge the adapter into the model and save that, or remove the file if it is merged already.",
            )
        self._config = read_object(config)
        self._tensors: dict[str, tuple[MappedFile, StoredTensor]] = {}
        for file in weight_files(folder):
            mapped = MappedFile(file)
            for name, tensor in read_header(mapped).items():
                if name in self._tensors:
                    other = self._tensors[name][0].path.name
                    raise CheckpointError(f"{folder}: tensor {name} is in {other} and in {file.name}.")
                self._tensors[name] = (mapped, tensor)
        self._require_index()
        self._settle_head()

    @property
    def source(self) -> str:
        return str(self._folder)

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        file = self._folder / "generation_config.json"
        return read_object(file) if file.is_file() else {}

    @cached_property
    def text(self) -> TextAssets:
        tokenizer = self._folder / "tokenizer.json"
        file = self._folder / "tokenizer_config.json"
        settings = read_object(file) if file.is_file() else {}
        return TextAssets(
            tokenizer_json=tokenizer if tokenizer.is_file() else None,
            tokenizer_config=settings,
            chat_template=_chat_template(self._folder, settings),
        )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1].shape

    def stored_as(self, name: str) -> str:
        return self._entry(name)[1].stored

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        _, tensor = self._entry(name)
        require_readable(self.source, name, tensor.stored)
        raw = self._raw_rows(name, start, stop)
        return _as_float32(raw, tensor.stored).reshape(stop - start, *tensor.shape[1:][-1:])

    def stored_matrix(self, name: str) -> None:
        """None: quantised/folder.py reads quantised matrices."""

    def raw_matrix(self, name: str) -> RawMatrix | None:
        tensor = self._entry(name)[1]
        if len(tensor.shape) < 2 or tensor.stored not in ("bf16", "f16"):
            return None
        count = _row_count(tensor)
        rows = self._raw_rows(name, 0, count).reshape(count, 2 * tensor.shape[-1])
        return RawMatrix(tensor.stored, rows, tensor.shape[-1])

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        return None

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        _, tensor = self._entry(name)
        if tensor.stored not in ("bf16", "f16"):
            return None
        return self._raw_rows(name, start, stop).view("<u2").reshape(stop - start, *tensor.shape[1:][-1:])

    def mapped_halves(self, name: str) -> NDArray[np.uint16] | None:
        return self.half_rows(name, 0, _row_count(self._entry(name)[1]))

    def stored_bytes(self, name: str) -> NDArray[np.uint8]:
        """All bytes of a tensor of any dtype, as they lie in the file: a view that costs nothing."""
        mapped, tensor = self._entry(name)
        return mapped.array(tensor.offset, tensor.bytes, f"tensor {name}")

    def release(self, name: str) -> None:
        mapped, tensor = self._entry(name)
        mapped.release(tensor.offset, tensor.bytes)

    def _raw_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The stored bytes of rows start..stop, as they lie in the file."""
        mapped, tensor = self._entry(name)
        assert tensor.shape, f"{name} is a single number and has no rows"
        count = _row_count(tensor)
        assert 0 <= start <= stop <= count, f"rows {start}..{stop} of {name} {tensor.shape}"
        row_bytes = tensor.bytes // max(count, 1)
        length = (stop - start) * row_bytes
        return mapped.array(tensor.offset + start * row_bytes, length, f"tensor {name}")

    def _entry(self, name: str) -> tuple[MappedFile, StoredTensor]:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.source} has no tensor {name}.", "Do config.json and the weights match?"
            )
        return self._tensors[name]

    def _settle_head(self) -> None:
        """A tied model may carry its head along: an exact copy is dropped, another matrix is used."""
        if self._config.get("tie_word_embeddings") is not True or HEAD not in self._tensors:
            return
        if embedding_copy(self) is not None:
            del self._tensors[HEAD]
        else:
            self._config = untied(self._config)

    def _require_index(self) -> None:
        """The index and the shards must agree on where every tensor is."""
        if (self._folder / SINGLE_FILE).is_file():
            return
        for name, file in _weight_map(self._folder).items():
            if name not in self._tensors or self._tensors[name][0].path.name != file:
                raise CheckpointError(
                    f"{self._folder / INDEX_FILE} says that tensor {name} is in {file}, but it is not.",
                    "The shards and the index come from different models: fetch the folder again.",
                )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, all of which exist."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.",
            "Point at the folder that holds the weights.",
        )
    shards = sorted(set(_weight_map(folder).values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing, first {missing[0]}.",
            "The download is incomplete: fetch it again.",
        )
    return [folder / shard for shard in shards]


def _row_count(tensor: StoredTensor) -> int:
    """Matrices that are stored one after another have their rows one after another."""
    return math.prod(tensor.shape[:-1]) if len(tensor.shape) > 2 else tensor.shape[0]


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index} has no weight_map.", "The index is damaged: fetch it again.")
    if len(table) > TENSOR_LIMIT:
        raise CheckpointError(
            f"{index} lists {len(table)} tensors; at most {TENSOR_LIMIT} make sense.",
            "The index is damaged: fetch it again.",
        )
    for name, file in table.items():
        # A shard is a file beside its index; a path that leads elsewhere is an attack or a mistake.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or Path(file).name != file
            or "\0" in file
        ):
            raise CheckpointError(f"{index} puts tensor {name} into {file!r}, which is no file beside it.")
    return table


def _as_float32(raw: NDArray[np.uint8], stored: str) -> NDArray[np.float32]:
    """Little-endian bytes as float32; each of the three formats is a subset of it, so nothing is rounded."""
    if stored == "bf16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN is reported with its row by check.require_finite
        return raw.view("<f4" if stored == "f32" else "<f2").astype(np.float32)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.", "It must be UTF-8 text.") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        default = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = default[0].get("template") if default else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of texts."
        )
    return template
