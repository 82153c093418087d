"""Checkpoints whose quant_method is "mxfp4" (gpt-oss): e2m1 in blocks of 32 with an exponent each."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from monotape.models.fields import Fields
from monotape.weights.quantised.method import Listed, read_list
from monotape.weights.quantised.packing import nibbles
from monotape.weights.quantised.stored import Kind, StoredMatrix
from monotape.weights.quantised.tensors import ModuleTensors, scale_rows

BLOCK = 32
_BLOCK_BYTES = BLOCK // 2
BLOCKS, SCALES = "_blocks", "_scales"  # after the name of the matrix
_EXPERTS = ".experts."  # in the name of each matrix of an expert


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """`complete`: the config lists every module that stays plain."""

    modules: Listed
    complete: bool

    name = "mxfp4"
    ends = frozenset((BLOCKS, SCALES))
    notes = ()

    def quantises(self, module: str) -> bool | None:
        """Without a list only the experts are sure to be: transformers and vLLM quantise nothing else this way."""
        if self.modules.names(module):
            return False
        return True if self.complete or _EXPERTS in f"{module}." else None

    def stores(self, tensors: ModuleTensors) -> bool:
        return BLOCKS in tensors.ends

    def matrix(self, tensors: ModuleTensors, name: str) -> StoredMatrix:
        """Of [rows, blocks, 16], or of [experts, rows, blocks, 16], whose rows follow one another."""
        packed = tensors.take(BLOCKS, ("u8",))
        if len(packed.shape) not in (3, 4) or packed.shape[-1] != _BLOCK_BYTES:
            raise packed.refusal(f"it must be rows by blocks by {_BLOCK_BYTES} bytes")
        *rows, blocks, _ = packed.shape
        scales = tensors.take(SCALES, ("u8", "f8_e8m0"))
        scales.require((*rows, blocks), f"{blocks} blocks a row")
        count = prod(rows)
        values = packed.array().reshape(count, blocks * _BLOCK_BYTES)
        return StoredMatrix(
            name, (*rows, blocks * BLOCK), Kind.E2M1, (1, BLOCK), "e8m0",
            lambda start, stop: nibbles(values[start:stop]),
            scale_rows(scales.array().reshape(count, blocks), 1, count),
        )  # fmt: skip


def read_mxfp4(fields: Fields) -> Mxfp4:
    """The quantization_config of an MXFP4 checkpoint."""
    kept, listed = read_list(fields, "modules_to_not_convert"), fields.names("modules_to_not_convert")
    fields.finish("mxfp4", frozenset(("quant_method", "dequantize")))
    return Mxfp4(kept, listed is not None)
