"""A Hugging Face folder with quantised weights, under the names and shapes of the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.fields import NOTES
from monotape.weights.checkpoint import TextAssets
from monotape.weights.quantised.config import read_method, section_of
from monotape.weights.quantised.method import Method
from monotape.weights.quantised.names import HEAD_MODULE, may_be_plain, siblings_of
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.quantised.tensors import ModuleTensors, RawTensor, positive_numbers
from monotape.weights.raw import RawMatrix
from monotape.weights.safetensors_folder import SafetensorsFolder
from monotape.weights.tied import HEAD, untied

_PLAIN = ("f32", "f16", "bf16")
#: Scales of a quantised KV cache. Here it has 16 bits, or powers of two of its own.
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")
_MISMATCH = "The weights and their quantization_config do not belong together: fetch the folder again."


@dataclass(frozen=True, slots=True)
class _Entry:
    """A quantised matrix and the tensors that it is made of."""

    matrix: StoredMatrix
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Contents:
    plain: frozenset[str]
    quantised: Mapping[str, _Entry]


class QuantisedFolder:
    """A checkpoint (see checkpoint.py). The config names no quantisation; each tensor has its format."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder
        self._method: Method = read_method(folder.config)
        self._config = self._plain_config()
        self._fitting: dict[str, bool] = {}

    @property
    def source(self) -> str:
        return self._folder.source

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._folder.generation_config

    @property
    def text(self) -> TextAssets:
        return self._folder.text

    @property
    def names(self) -> frozenset[str]:
        return self._contents.plain | self._contents.quantised.keys()

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        entry = self._contents.quantised.get(name)
        return None if entry is None else entry.matrix

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self.stored_matrix(name)
        return self._folder.shape(name) if matrix is None else matrix.shape

    def stored_as(self, name: str) -> str:
        matrix = self.stored_matrix(name)
        return self._folder.stored_as(name) if matrix is None else matrix.label

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        matrix = self.stored_matrix(name)
        return self._folder.rows(name, start, stop) if matrix is None else matrix.dequantised(start, stop)

    def raw_matrix(self, name: str) -> RawMatrix | None:
        return self._folder.raw_matrix(name) if self.stored_matrix(name) is None else None

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        matrix = self.stored_matrix(name)
        if matrix is None:
            return self._folder.integer_rows(name, start, stop)
        if name not in self._fitting:
            self._fitting[name] = matrix.fits_q8()
        return matrix.as_q8(start, stop) if self._fitting[name] else None

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        return self._folder.half_rows(name, start, stop) if self.stored_matrix(name) is None else None

    def mapped_halves(self, name: str) -> NDArray[np.uint16] | None:
        return self._folder.mapped_halves(name) if self.stored_matrix(name) is None else None

    def release(self, name: str) -> None:
        entry = self._contents.quantised.get(name)
        for tensor in (name,) if entry is None else entry.tensors:
            self._folder.release(tensor)

    def _plain_config(self) -> dict[str, Any]:
        """The config as the plain model has it, with notes of what is read in another way than it is told."""
        config = dict(self._folder.config)
        section = section_of(config)
        assert section is not None
        del config[section]
        notes = [f"The weights are stored quantised, as {self._method.name}.", *self._method.notes]
        if any(name.rpartition(".")[2] in _CACHE_SCALES for name in self._folder.names):
            notes.append("The stored scales of the KV cache are not used.")
        config[f"{NOTES}_quantised"] = notes
        packed = any(name.startswith(f"{HEAD_MODULE}.") for name in self._folder.names - {HEAD})
        if config.get("tie_word_embeddings") is True and packed and HEAD not in self._folder.names:
            return untied(config)
        return config

    @cached_property
    def _contents(self) -> _Contents:
        """Every tensor of the folder, as one of the plain model or as a part of a quantised matrix."""
        modules: dict[str, dict[str, str]] = {}
        plain: set[str] = set()
        for name in sorted(self._folder.names):
            if name.rpartition(".")[2] in _CACHE_SCALES:
                positive_numbers(self._raw(name))
                continue
            module, end = self._split(name)
            modules.setdefault(module, {})[end] = name
        entries: dict[str, _Entry] = {}
        for module, names in modules.items():
            raw = {end: self._raw(name) for end, name in names.items()}
            tensors = ModuleTensors(self.source, module.removesuffix(".weight"), raw)
            if self._method.stores(tensors):
                name, entry = self._quantised(module, tensors, names)
                entries[name] = entry
                plain.update(set(names.values()) - set(entry.tensors))
            else:
                self._require_plain(tensors, names)
                plain.update(names.values())
        for name in sorted(plain & entries.keys()):
            raise CheckpointError(f"{self.source} has {name} twice, plain and quantised.", _MISMATCH)
        self._require_whole_stages(entries, plain)
        return _Contents(frozenset(plain), entries)

    def _split(self, name: str) -> tuple[str, str]:
        """The module and the end of a tensor's name. Some ends begin within the last step of it."""
        for end in self._method.ends:
            if end.startswith("_") and name.endswith(end):
                return name.removesuffix(end), end
        module, _, end = name.rpartition(".")
        return module, end

    def _raw(self, name: str) -> RawTensor:
        return RawTensor(
            name,
            self._folder.shape(name),
            self._folder.stored_as(name),
            partial(self._folder.stored_bytes, name),
        )

    def _quantised(self, module: str, tensors: ModuleTensors, names: Mapping[str, str]) -> tuple[str, _Entry]:
        if self._method.quantises(tensors.module) is False:
            raise CheckpointError(
                f"{self.source}: the quantization_config leaves {tensors.module} as it is, but it is stored quantised.",
                _MISMATCH,
            )
        inside = any(end.startswith("_") for end in self._method.ends)
        name = module if inside else f"{module}.weight"
        matrix = self._method.matrix(tensors, name)
        left = (tensors.ends & (self._method.ends | {"weight"})) - tensors.taken
        if left:
            raise CheckpointError(
                f"{self.source}: {tensors.module} has {', '.join(sorted(left))}, which its quantisation does not use.",
                _MISMATCH,
            )
        return name, _Entry(matrix, tuple(names[end] for end in sorted(tensors.taken)))

    def _require_plain(self, tensors: ModuleTensors, names: Mapping[str, str]) -> None:
        """A module without a quantised matrix has no part of one, and is one that the config leaves alone."""
        left = tensors.ends & self._method.ends
        if left:
            raise CheckpointError(
                f"{self.source}: {tensors.module} has {', '.join(sorted(left))}, but no quantised matrix.",
                _MISMATCH,
            )
        weight = names.get("weight")
        if weight is None or tensors.stored("weight") not in _PLAIN or len(self._folder.shape(weight)) != 2:
            return
        module = tensors.module
        if not may_be_plain(module) and self._method.quantises(module):
            raise CheckpointError(
                f"{self.source}: the quantization_config says that {module} is quantised, but it is stored as "
                f"{tensors.stored('weight')}.",
                _MISMATCH,
            )

    def _require_whole_stages(self, entries: Mapping[str, _Entry], plain: set[str]) -> None:
        for name in entries:
            module = name.removesuffix(".weight")
            other = next((part for part in siblings_of(module) if f"{part}.weight" in plain), None)
            if other is not None:
                raise CheckpointError(
                    f"{self.source}: {module} is quantised and {other} is not, but both are one matrix to the kernels.",
                    "Use a checkpoint that quantises all of q, k and v, and both of gate and up, or none of them.",
                )
