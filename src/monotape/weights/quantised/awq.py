"""AWQ checkpoints of version "gemm": 4-bit integers, packed along the rows of the matrix in an order of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError, UnsupportedModel
from monotape.models.fields import Fields
from monotape.weights.quantised.codes import SCALE_KINDS
from monotape.weights.quantised.method import (
    Listed,
    finish_integers,
    group_count,
    read_group_size,
    read_list,
    read_skipped,
)
from monotape.weights.quantised.packing import AWQ_ORDER, Codes, transposed
from monotape.weights.quantised.stored import DAMAGED, Kind, StoredMatrix
from monotape.weights.quantised.tensors import FLOAT_SCALES, ModuleTensors, scale_rows

_PER_WORD = 8
#: How others carry out the product, beside what GPTQ files say too. `zero_point` says what GPTQ calls `sym`.
_HARMLESS = frozenset(("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "sym"))


@dataclass(frozen=True, slots=True)
class Awq:
    """`group`: columns that share a scale; None: all of them."""

    group: int | None
    zero_point: bool
    modules: Listed

    name = "awq"
    ends = frozenset(("qweight", "qzeros", "scales"))
    notes = ()

    def quantises(self, module: str) -> bool:
        return not self.modules.names(module)

    def stores(self, tensors: ModuleTensors) -> bool:
        return "qweight" in tensors.ends

    def matrix(self, tensors: ModuleTensors, name: str) -> StoredMatrix:
        packed = tensors.take("qweight", ("i32",), 2)
        columns, rows = packed.shape[0], packed.shape[1] * _PER_WORD
        groups = group_count(tensors, columns, self.group)
        shape = f"{rows} rows of {columns} in groups of {columns // groups}"
        scales = tensors.take("scales", FLOAT_SCALES, 2)
        scales.require((groups, rows), shape)
        zeros = None
        if self.zero_point or "qzeros" in tensors.ends:
            zeros = tensors.take("qzeros", ("i32",), 2)
            zeros.require((groups, rows // _PER_WORD), shape)
        return StoredMatrix(
            name, (rows, columns), Kind.INT4, (1, columns // groups), SCALE_KINDS[scales.stored],
            partial(_file_columns, packed.array()), scale_rows(scales.array().T, 1, rows),
            None if zeros is None else partial(self._zeros, name, zeros.array()), symmetric=not self.zero_point,
        )  # fmt: skip

    def _zeros(self, name: str, words: NDArray[np.int32], start: int, stop: int) -> Codes | None:
        """Zero points of rows start..stop; None where all are the middle. AutoRound stores them even then."""
        found = _file_columns(words, start, stop)
        if self.zero_point:
            return found
        if (found != Kind.INT4.middle).any():
            raise CheckpointError(
                f"Tensor {name} has zero points other than {Kind.INT4.middle}, but the config says zero_point = false.",
                DAMAGED,
            )
        return None


def _file_columns(words: NDArray[np.int32], start: int, stop: int) -> Codes:
    """Rows start..stop of the matrix, which are columns of the file."""
    first, last = start // _PER_WORD, -(-stop // _PER_WORD)
    found = transposed(words[:, first:last], 4, AWQ_ORDER)
    return found[start - first * _PER_WORD : stop - first * _PER_WORD]


def read_awq(fields: Fields) -> Awq:
    """The quantization_config of an AWQ checkpoint."""
    fields.fixed({"bits": (4,), "w_bit": (4,), "desc_act": (False,), "pack_dtype": ("int32",)}, "awq")
    fields.fixed({"modules_in_block_to_quantize": ([],)}, "awq")
    for name in ("version", "format", "checkpoint_format"):
        version = fields.optional_text(name)
        if version is not None and version.lower() != "gemm":
            raise UnsupportedModel(
                f"{fields.says(name)}, a layout that is not supported for awq.",
                "Use a checkpoint of version gemm, or the same model as GPTQ or compressed-tensors.",
            )
    backend = fields.optional_text("backend")
    if backend is not None and backend.lower() == "llm-awq":
        raise UnsupportedModel(
            f"{fields.says('backend')}, a layout that is not supported.", "Use a checkpoint of version gemm."
        )
    kept = read_list(fields, "modules_to_not_convert")
    found = Awq(
        read_group_size(fields),
        fields.flag("zero_point", True),
        Listed((*kept.patterns, *read_skipped(fields))),
    )
    finish_integers(fields, "awq", _HARMLESS)
    return found
