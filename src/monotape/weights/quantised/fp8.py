"""Checkpoints whose quant_method is "fp8": e4m3 with a scale for each block, or for each tensor (AutoFP8)."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.errors import UnsupportedModel
from monotape.models.fields import Fields
from monotape.weights.quantised.codes import SCALE_KINDS
from monotape.weights.quantised.method import ACTIVATIONS_NOTE, Listed, read_list
from monotape.weights.quantised.stored import Kind, StoredMatrix
from monotape.weights.quantised.tensors import FLOAT_SCALES, ModuleTensors, scale_rows, single_number

BLOCK_SCALE, TENSOR_SCALE = "weight_scale_inv", "weight_scale"  # both multiply, whatever the names say
_ACTIVATION_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True, slots=True)
class Fp8:
    """`block`: rows and columns that share a scale; None: the whole tensor does."""

    block: tuple[int, int] | None
    static: bool
    modules: Listed

    name = "fp8"
    ends = frozenset((BLOCK_SCALE, TENSOR_SCALE, *_ACTIVATION_SCALES))
    matrix_end = "weight"

    def quantises(self, module: str) -> bool:
        return not self.modules.names(module)

    def stores(self, tensors: ModuleTensors) -> bool:
        return tensors.stored("weight") == "f8_e4m3"

    def matrix(self, tensors: ModuleTensors, name: str) -> StoredMatrix:
        weight = tensors.take("weight", ("f8_e4m3",), 2)
        rows, columns = weight.shape
        tensors.check_numbers(_ACTIVATION_SCALES)
        if self.block is None:
            end = BLOCK_SCALE if BLOCK_SCALE in tensors.ends else TENSOR_SCALE
            tensors.refuse(TENSOR_SCALE if end == BLOCK_SCALE else BLOCK_SCALE, "it must have one scale only")
            scale = tensors.take(end, FLOAT_SCALES)
            single_number(scale)
            height, width, lines = rows, columns, (1, 1)
        else:
            tensors.refuse(
                TENSOR_SCALE, "the config says weight_block_size, which goes with weight_scale_inv"
            )
            scale = tensors.take(BLOCK_SCALE, (*FLOAT_SCALES, "f8_e8m0"), 2)
            height, width = self.block
            lines = (-(-rows // height), -(-columns // width))
            scale.require(lines, f"a {rows} x {columns} matrix in blocks of {height} x {width}")
        values = weight.array()
        return StoredMatrix(
            name, weight.shape, Kind.E4M3, (height, width), SCALE_KINDS[scale.stored],
            lambda start, stop: values[start:stop], scale_rows(scale.array().reshape(lines), height, rows),
        )  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        return (ACTIVATIONS_NOTE,) if self.static else ()


def read_fp8(fields: Fields) -> Fp8:
    """The quantization_config of an FP8 checkpoint."""
    fields.fixed(
        {"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("float", "ue8m0"), "expert_dtype": ("fp8",)}, "fp8"
    )
    scheme = fields.optional_text("activation_scheme") or "dynamic"
    if scheme not in ("static", "dynamic"):
        raise UnsupportedModel(
            f"{fields.says('activation_scheme')}, which is not supported.", "Supported: static, dynamic."
        )
    sides = fields.integers("weight_block_size", 1, 1 << 20)
    if sides is not None and len(sides) != 2:
        raise fields.wrong("weight_block_size", "must be two numbers, rows and columns")
    block = None if sides is None else (sides[0], sides[1])
    fields.fixed({"modules_to_convert": ([],), "kv_cache_scheme": ("static", "dynamic")}, "fp8")
    kept = read_list(fields, "modules_to_not_convert", "ignored_layers")
    fields.finish("fp8", frozenset(("quant_method", "dequantize", "kv_cache_quant_method")))
    return Fp8(block, scheme == "static", kept)
