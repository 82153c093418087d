"""GPTQ checkpoints, formats "gptq" and "gptq_v2": 4- or 8-bit integers, packed along the columns of the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError, UnsupportedModel
from monotape.models.fields import Fields
from monotape.weights.quantised.codes import SCALE_KINDS
from monotape.weights.quantised.columns import groups_of_columns
from monotape.weights.quantised.method import (
    Listed,
    finish_integers,
    group_count,
    read_group_size,
    read_list,
    read_skipped,
)
from monotape.weights.quantised.names import HEAD_MODULE
from monotape.weights.quantised.packing import Codes, along_columns, transposed
from monotape.weights.quantised.stored import DAMAGED, Kind, StoredMatrix
from monotape.weights.quantised.tensors import FLOAT_SCALES, ModuleTensors, scale_rows

_KINDS = {4: Kind.INT4, 8: Kind.INT8}
#: Where the file comes from and how others carry out the product, beside what AWQ files say too.
_HARMLESS = frozenset((
    "model_name_or_path", "model_file_base_name", "use_cuda_fp16", "use_exllama", "disable_exllama", "backend",
    "version",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gptq:
    """`group`: columns that share a scale; None: all of them. `only`: the modules of a block that are quantised."""

    bits: int
    group: int | None
    symmetric: bool
    sorted_columns: bool  # desc_act
    first_version: bool  # zero points are stored less one
    modules: Listed
    only: tuple[str, ...] | None

    name = "gptq"
    ends = frozenset(("qweight", "qzeros", "scales", "g_idx"))
    notes = ()

    def quantises(self, module: str) -> bool:
        if self.modules.names(module):
            return False
        return (
            self.only is None
            or module == HEAD_MODULE
            or any(module.endswith(f".{name}") for name in self.only)
        )

    def stores(self, tensors: ModuleTensors) -> bool:
        return "qweight" in tensors.ends

    def matrix(self, tensors: ModuleTensors, name: str) -> StoredMatrix:
        packed = tensors.take("qweight", ("i32",), 2)
        per_word = 32 // self.bits
        columns, rows = packed.shape[0] * per_word, packed.shape[1]
        groups = group_count(tensors, columns, self.group)
        shape = f"{rows} rows of {columns} in groups of {columns // groups}"
        scales = tensors.take("scales", FLOAT_SCALES, 2)
        scales.require((groups, rows), shape)
        zeros = tensors.take("qzeros", ("i32",), 2)
        zeros.require((groups, -(-rows // per_word)), shape)
        words = packed.array()
        return StoredMatrix(
            name, (rows, columns), _KINDS[self.bits], (1, columns // groups), SCALE_KINDS[scales.stored],
            lambda start, stop: along_columns(words[:, start:stop].T, self.bits),
            scale_rows(scales.array().T, 1, rows), partial(self._zeros, name, zeros.array()),
            self._groups(tensors, columns, groups), symmetric=self.symmetric,
        )  # fmt: skip

    def _groups(self, tensors: ModuleTensors, columns: int, groups: int) -> NDArray[np.int32] | None:
        index = tensors.optional("g_idx", ("i32", "i64"))
        if index is None:
            if self.sorted_columns and groups > 1:
                tensors.take("g_idx", ("i32",))
            return None
        found = groups_of_columns(index, columns, groups)
        if found is not None and not self.sorted_columns:
            raise CheckpointError(
                f"Tensor {index.name} puts the columns into another order, but the config says desc_act = false.",
                "Engines read such a file differently: use another checkpoint.",
            )
        return found

    def _zeros(self, name: str, words: NDArray[np.int32], start: int, stop: int) -> Codes | None:
        """Zero points of rows start..stop; None where all are the middle."""
        per_word, middle = 32 // self.bits, _KINDS[self.bits].middle
        first, last = start // per_word, -(-stop // per_word)
        found = transposed(words[:, first:last], self.bits)[
            start - first * per_word : stop - first * per_word
        ]
        if self.first_version:
            top = (1 << self.bits) - 1
            if (found == top).any():
                raise CheckpointError(
                    f"Tensor {name} has a stored zero point of {top}, which engines read as 0 or as {top + 1}.",
                    "Use a checkpoint of the format gptq_v2, or a symmetric one.",
                )
            found = found + np.uint8(1)
        if self.symmetric and (found != middle).any():
            raise CheckpointError(
                f"Tensor {name} has zero points other than {middle}, but the config says sym = true.", DAMAGED
            )
        return None if self.symmetric else found


def read_gptq(fields: Fields) -> Gptq:
    """The quantization_config of a GPTQ checkpoint."""
    fields.fixed({"bits": tuple(_KINDS), "pack_dtype": ("int32",), "is_marlin_format": (False,)}, "gptq")
    fields.fixed({"rotation": ("",), "hyb_act": (False,)}, "gptq")
    bits = fields.integer("bits", 4, 8)
    group, kept = read_group_size(fields), read_list(fields, "modules_to_not_convert")
    skipped = Listed((*kept.patterns, *read_skipped(fields)))
    only = _read_blocks(fields)
    found = Gptq(
        bits, group, fields.flag("sym", True), fields.flag("desc_act", False), _read_version(fields),
        skipped, only,
    )  # fmt: skip
    finish_integers(fields, "gptq", _HARMLESS)
    return found


def _read_version(fields: Fields) -> bool:
    """Is it the first version? Two names of the field are in use, and must agree."""
    named = {
        value.lower()
        for name in ("checkpoint_format", "format")
        if (value := fields.optional_text(name)) is not None
    }
    if len(named) > 1:
        raise fields.wrong("checkpoint_format", "format says something else")
    version = next(iter(named), "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"config.json says that the weights are in the format {version}, which is not supported for gptq.",
            "Supported: gptq and gptq_v2. Convert it, or use the same model as AWQ or compressed-tensors.",
        )
    return version == "gptq"


def _read_blocks(fields: Fields) -> tuple[str, ...] | None:
    """The modules of a block that are quantised, where the config lists them: a list of lists of names."""
    groups: Any = fields.anything("modules_in_block_to_quantize")
    if groups is None:
        return None
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise fields.wrong("modules_in_block_to_quantize", "must be a list of lists of names")
    names = [name for group in groups for name in group]
    if not all(type(name) is str for name in names):
        raise fields.wrong("modules_in_block_to_quantize", "must be a list of lists of names")
    return tuple(names)
