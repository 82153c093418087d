"""The matrices of compressed-tensors: packed integers, FP8, int8 and FP4, by the scheme of their group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.quantised.codes import SCALE_KINDS
from monotape.weights.quantised.columns import groups_of_columns
from monotape.weights.quantised.method import group_count
from monotape.weights.quantised.packing import Codes, along_columns, nibbles, transposed
from monotape.weights.quantised.stored import DAMAGED, Kind, StoredMatrix
from monotape.weights.quantised.tensors import (
    FLOAT_SCALES,
    ModuleTensors,
    RawTensor,
    scale_rows,
    single_number,
)

#: The types of weights that are read in each format.
FORMATS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "naive-quantized": (("float", 8), ("int", 8)),
    "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),),
}
_ACTIVATION_SCALES = ("input_scale", "output_scale", "input_global_scale")
#: Of activations that are quantised with zero points: integers that mean nothing here.
_ACTIVATION_ZEROS = ("input_zero_point", "output_zero_point")
ENDS = frozenset((
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    *_ACTIVATION_SCALES, *_ACTIVATION_ZEROS,
))  # fmt: skip
_FP4 = {"nvfp4-pack-quantized": (16, ("f8_e4m3",)), "mxfp4-pack-quantized": (32, ("u8", "f8_e8m0"))}
_SIDE_LIMIT = 1 << 24  # rows or columns that a stored shape may claim


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The section "weights" of a group, with the group's format."""

    form: str
    kind: str  # "int" or "float"
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    scattered: bool  # the columns of a group do not lie side by side


def holds_matrix(tensors: ModuleTensors) -> bool:
    return "weight_packed" in tensors.ends or tensors.stored("weight") in ("f8_e4m3", "i8")


def compressed_matrix(scheme: WeightScheme, tensors: ModuleTensors, name: str) -> StoredMatrix:
    """The module's matrix; every tensor that belongs to it is checked against the scheme."""
    tensors.check_numbers(_ACTIVATION_SCALES)
    for end in _ACTIVATION_ZEROS:
        tensors.optional(end, ("i8", "i32", "i64", "f8_e4m3"))
    if scheme.form in _FP4:
        return _fp4_matrix(scheme, tensors, name)
    shape, kind, read = (
        _packed(scheme, tensors) if scheme.form == "pack-quantized" else _plain(scheme, tensors)
    )
    rows, columns = shape
    height, width, lines = _groups(scheme, tensors, rows, columns)
    scales = tensors.take("weight_scale", FLOAT_SCALES)
    if lines == (1, 1):
        if scales.shape not in ((), (1,), (1, 1)):
            raise scales.refusal("a single scale must be a single number")
    else:
        # A column of scales may have lost its second dimension.
        alike = lines[1] == 1 and scales.shape == lines[:1]
        scales.require(lines[:1] if alike else lines, f"the strategy {scheme.strategy} on {rows} x {columns}")
    return StoredMatrix(
        name, shape, kind, (height, width), SCALE_KINDS[scales.stored], read,
        scale_rows(scales.array().reshape(lines), height, rows),
        _zeros(scheme, tensors, height, rows, lines), _column_groups(scheme, tensors, columns, lines[1]),
        symmetric=scheme.symmetric,
    )  # fmt: skip


def _packed(
    scheme: WeightScheme, tensors: ModuleTensors
) -> tuple[tuple[int, int], Kind, Callable[[int, int], Codes]]:
    """Integers in 32-bit words along the columns; the last word of a row may have room left."""
    packed = tensors.take("weight_packed", ("i32",), 2)
    rows, columns = _stored_shape(tensors.take("weight_shape", ("i32", "i64"), 1))
    packed.require(
        (rows, -(-columns * scheme.bits // 32)), f"a {rows} x {columns} matrix of {scheme.bits} bits"
    )
    words: NDArray[np.int32] = packed.array()
    kind = Kind.INT4 if scheme.bits == 4 else Kind.INT8
    return (
        (rows, columns),
        kind,
        lambda start, stop: along_columns(words[start:stop], scheme.bits)[:, :columns],
    )


def _plain(
    scheme: WeightScheme, tensors: ModuleTensors
) -> tuple[tuple[int, int], Kind, Callable[[int, int], Codes]]:
    """One byte a value, under the plain model's own name."""
    floats = scheme.kind == "float"
    weight = tensors.take("weight", ("f8_e4m3",) if floats else ("i8",), 2)
    values: Codes = weight.bytes().reshape(weight.shape)
    # Signed bytes become offset ones: the highest bit is turned round.
    flip = np.uint8(0 if floats else 0x80)
    shape = (weight.shape[0], weight.shape[1])
    return shape, Kind.E4M3 if floats else Kind.INT8, lambda start, stop: values[start:stop] ^ flip


def _stored_shape(tensor: RawTensor) -> tuple[int, int]:
    tensor.require((2,), "the shape of a matrix")
    rows, columns = (int(side) for side in tensor.array())
    if not (0 < rows <= _SIDE_LIMIT and 0 < columns <= _SIDE_LIMIT):
        raise CheckpointError(
            f"Tensor {tensor.name} says that the matrix has {rows} rows and {columns} columns.",
            "The file is damaged: fetch it again.",
        )
    return rows, columns


def _groups(
    scheme: WeightScheme, tensors: ModuleTensors, rows: int, columns: int
) -> tuple[int, int, tuple[int, int]]:
    """Rows and columns that share a scale, and the shape of all scales."""
    if scheme.strategy == "tensor":
        return rows, columns, (1, 1)
    if scheme.strategy == "block":
        assert scheme.block is not None
        height, width = scheme.block
        return height, width, (-(-rows // height), -(-columns // width))
    groups = group_count(tensors, columns, scheme.group_size)
    return 1, columns // groups, (rows, groups)


def _zeros(
    scheme: WeightScheme, tensors: ModuleTensors, height: int, rows: int, lines: tuple[int, int]
) -> Callable[[int, int], Codes | None] | None:
    if scheme.symmetric:
        tensors.refuse("weight_zero_point", "the config says symmetric = true")
        return None
    zeros = tensors.take("weight_zero_point", ("i32", "i8"))
    if zeros.stored == "i8":  # one byte each, as the weights' own scales lie
        if zeros.shape not in (
            lines,
            lines[:1] if lines[1] == 1 else lines,
            () if lines == (1, 1) else lines,
        ):
            raise zeros.refusal(f"there are {lines[0]} x {lines[1]} scales")
        codes = zeros.array().reshape(lines).astype(np.int16) + (1 << (scheme.bits - 1))
        if codes.min() < 0 or codes.max() >= 1 << scheme.bits:
            raise CheckpointError(
                f"Tensor {zeros.name} holds zero points beyond {scheme.bits} bits.", DAMAGED
            )
        return scale_rows(codes.astype(np.uint8), height, rows)
    per_word = 32 // scheme.bits
    zeros.require((-(-rows // per_word), lines[1]), f"{rows} rows with {lines[1]} zero points each")
    return partial(_packed_zeros, zeros.array(), scheme.bits)


def _packed_zeros(words: NDArray[np.int32], bits: int, start: int, stop: int) -> Codes:
    """Zero points are packed along the rows of the matrix."""
    per_word = 32 // bits
    first, last = start // per_word, -(-stop // per_word)
    return transposed(words[first:last].T, bits)[start - first * per_word : stop - first * per_word]


def _column_groups(
    scheme: WeightScheme, tensors: ModuleTensors, columns: int, groups: int
) -> NDArray[np.int32] | None:
    if not scheme.scattered:
        tensors.refuse("weight_g_idx", "the config's actorder says that columns keep their order")
        return None
    return groups_of_columns(tensors.take("weight_g_idx", ("i32", "i64")), columns, groups)


def _fp4_matrix(scheme: WeightScheme, tensors: ModuleTensors, name: str) -> StoredMatrix:
    size, scale_types = _FP4[scheme.form]
    if scheme.group_size != size:
        raise CheckpointError(
            f"{tensors.source}: {scheme.form} has groups of {size}, but the config says {scheme.group_size}.",
            "The config contradicts itself: use another checkpoint.",
        )
    packed = tensors.take("weight_packed", ("u8",), 2)
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    scales = tensors.take("weight_scale", scale_types, 2)
    scales.require(
        (rows, group_count(tensors, columns, size)), f"{rows} rows of {columns} in groups of {size}"
    )
    divisor = 1.0
    if scheme.form.startswith("nv"):
        divisor = single_number(tensors.take("weight_global_scale", ("f32",)))
    values = packed.bytes().reshape(packed.shape)
    return StoredMatrix(
        name, (rows, columns), Kind.E2M1, (1, size), SCALE_KINDS[scales.stored],
        lambda start, stop: nibbles(values[start:stop]), scale_rows(scales.array(), 1, rows), divisor=divisor,
    )  # fmt: skip
