"""For every format of a GPU's tape: rows of floats as codes, and the values that codes stand for.

These define formats for tests, by the formulas of plan/formats.py, and quantise without care.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.tiles import BLOCK_K
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.types import Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.coded import Coded
from monotape.weights.quantised.codes import E4M3
from monotape.weights.rounding import fp8_rows, to_e4m3
from monotape.weights.tapes import TileRun, in_tiles, part_rows, rows_of, source_of, tensor_name

Values = NDArray[np.float32]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def groups_of(values: Values, size: int) -> Values:
    return values.reshape(len(values), -1, size)


def largest(groups: Values) -> Values:
    return np.maximum(np.abs(groups).max(axis=2), np.float32(1e-9))


def symmetric(size: int, bits: int) -> Callable[[Values], Coded]:
    """(q - middle) d."""

    def encode(values: Values) -> Coded:
        middle, groups = 1 << (bits - 1), groups_of(values, size)
        scales = (largest(groups) / (middle - 1)).astype(np.float16)
        steps = np.where(scales > 0, scales, 1).astype(np.float32)[..., None]
        codes = (np.rint(groups / steps) + middle).clip(0, 2 * middle - 1)
        return Coded(codes.astype(np.uint8).reshape(values.shape), (scales,))

    return encode


def fp8(values: Values) -> Coded:
    codes, scales = fp8_rows(values)
    return Coded(codes, row_scales=scales[:, 0])


def int4(size: int, *, zeros: bool) -> Callable[[Values], Coded]:
    """(q - z) d, and a power of two for each row."""

    def encode(values: Values) -> Coded:
        groups = groups_of(values, size)
        low = np.minimum(groups.min(axis=2), 0)
        span = (np.maximum(groups.max(axis=2), 0) - low) / 15 if zeros else largest(groups) / 7
        of_rows = np.exp2(np.floor(np.log2(np.maximum(span.max(axis=1), 1e-9)))).astype(np.float32)
        scales = (span / of_rows[:, None]).astype(np.float16)
        steps = np.where(scales > 0, scales, 1).astype(np.float32) * of_rows[:, None]
        points = np.rint(-low / steps).clip(0, 15) if zeros else np.full(low.shape, 8)
        codes = np.rint(groups / steps[..., None] + points[..., None]).clip(0, 15).astype(np.uint8)
        planes = (scales, points.astype(np.float16)) if zeros else (scales,)
        return Coded(codes.reshape(values.shape), planes, row_scales=of_rows)

    return encode


def whole_blocks(values: Values) -> Values:
    """Zeros up to whole blocks of k."""
    return np.pad(values, ((0, 0), (0, -values.shape[1] % BLOCK_K)))


def int8_rows(values: Values) -> Coded:
    scales = np.maximum(np.abs(values).max(axis=1), np.float32(1e-9)) / np.float32(127)
    codes = np.rint(values / scales[:, None]) + 128
    codes[:, 0] = 0  # -128, which has no positive counterpart
    return Coded(codes.astype(np.uint8), row_scales=scales.astype(np.float32))


def with_minimum(values: Values) -> Coded:
    groups = groups_of(values, 32)
    low = groups.min(axis=2)
    scales = ((groups.max(axis=2) - low) / 15).astype(np.float16)
    steps = np.where(scales > 0, scales, 1).astype(np.float32)[..., None]
    codes = np.rint((groups - low[..., None]) / steps).clip(0, 15)
    return Coded(codes.astype(np.uint8).reshape(values.shape), (scales, low.astype(np.float16)))


def fp8_groups(values: Values) -> Coded:
    groups = groups_of(values, 128)
    scales = (largest(groups) / 448).astype(np.float32)
    return Coded(to_e4m3(groups / scales[..., None]).reshape(values.shape), (scales,))


def mxfp4(values: Values) -> Coded:
    groups = groups_of(values, 32)
    exponents = np.floor(np.log2(largest(groups))) - 1
    scaled = groups / np.exp2(exponents)[..., None].astype(np.float32)
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(axis=-1) + 8 * np.signbit(scaled)
    return Coded(codes.astype(np.uint8).reshape(values.shape), ((exponents + 127).astype(np.uint8),))


def k_quant(bits: int, size: int) -> Callable[[Values], Coded]:
    """q d s - e m, with d and e of 256 values: each block of 128 repeats them."""

    def encode(values: Values) -> Coded:
        groups = groups_of(values, size)
        low = -np.minimum(groups.min(axis=2), 0)
        wanted = np.maximum((groups.max(axis=2) + low) / (2**bits - 1), np.float32(1e-4))
        each = 128 // size
        d = (by_block(wanted, each) / 63).astype(np.float16)
        e = (np.maximum(by_block(low, each), np.float32(1e-4)) / 63).astype(np.float16)
        scales = np.rint(wanted / spread(d, each)).clip(0, 63)
        minimums = np.rint(low / spread(e, each)).clip(0, 63)
        steps = np.where(scales > 0, scales * spread(d, each), 1)[..., None]
        codes = np.rint((groups + (minimums * spread(e, each))[..., None]) / steps).clip(0, 2**bits - 1)
        return Coded(
            codes.astype(np.uint8).reshape(values.shape),
            (scales.astype(np.int8), minimums.astype(np.int8)), (d, e),
        )  # fmt: skip

    return encode


def by_block(numbers: Values, each: int) -> Values:
    """The largest of a block."""
    found: Values = numbers.reshape(len(numbers), -1, each).max(axis=2)
    return found


def spread(of_blocks: NDArray[Any], each: int) -> Values:
    return np.repeat(of_blocks.astype(np.float32), each, axis=1)


def six_bits(values: Values) -> Coded:
    groups = groups_of(values, 16)
    signs = np.where(np.arange(groups.shape[1]) % 2, -1, 1)  # some scales are negative
    wanted = np.maximum(largest(groups) / 31, np.float32(1e-4)) * signs
    d = (by_block(np.abs(wanted), 8) / 127).astype(np.float16)
    scales = np.rint(wanted / spread(d, 8)).clip(-128, 127)
    steps = np.where(scales != 0, scales * spread(d, 8), 1)[..., None]
    codes = (np.rint(groups / steps) + 32).clip(0, 63)
    return Coded(codes.astype(np.uint8).reshape(values.shape), (scales.astype(np.int8),), (d,))


def wide(values: Values) -> Coded:
    groups = groups_of(values, 16)
    low = groups.min(axis=2)
    scales = np.maximum(groups.max(axis=2) - low, np.float32(1e-9)) / np.float32(255)
    codes = np.rint((groups - low[..., None]) / scales[..., None]).clip(0, 255)
    return Coded(codes.astype(np.uint8).reshape(values.shape), (scales, low))


ENCODERS: dict[Format, Callable[[Values], Coded]] = {
    Format.FP8: fp8,
    Format.INT4_G32: int4(32, zeros=False),
    Format.INT4_G64: int4(64, zeros=False),
    Format.INT4_G128: int4(128, zeros=False),
    Format.INT4_G32Z: int4(32, zeros=True),
    Format.INT4_G64Z: int4(64, zeros=True),
    Format.INT4_G128Z: int4(128, zeros=True),
    Format.FP8_BLOCK: fp8_groups,
    Format.INT8: int8_rows,
    Format.MXFP4: mxfp4,
    Format.Q8: symmetric(32, 8),
    Format.Q4_1: with_minimum,
    Format.Q5_0: symmetric(32, 5),
    Format.Q4_K: k_quant(4, 32),
    Format.Q5_K: k_quant(5, 32),
    Format.Q6_K: six_bits,
    Format.K_MIXED: k_quant(6, 16),
    Format.WIDE: wide,
}


def decoded(fmt: Format, coded: Coded) -> Values:
    """What the format says that the rows are, in float32."""
    codes = coded.codes
    if fmt in (Format.FP8, Format.FP8_BLOCK):
        numbers = E4M3[codes]
    elif fmt is Format.MXFP4:
        numbers = E2M1[codes & 7] * np.where(codes >> 3, np.float32(-1), np.float32(1))
    else:
        numbers = codes.astype(np.float32)
    scale, shift = _factors(fmt, coded)
    values = (
        groups_of(numbers, codes.shape[1] // scale.shape[1]) * scale[..., None] + shift[..., None]
    ).reshape(codes.shape)
    rows = np.float32(1) if coded.row_scales is None else coded.row_scales[:, None]
    return (values * rows).astype(np.float32)


def _factors(fmt: Format, coded: Coded) -> tuple[Values, Values]:
    one = np.ones((len(coded.codes), 1), np.float32)
    first = coded.of_groups[0].astype(np.float32) if coded.of_groups else one
    if fmt in (Format.FP8, Format.FP8_BLOCK):
        return first, 0 * first
    if fmt is Format.INT8:
        return one, -128 * one
    if fmt is Format.MXFP4:
        return np.exp2(first - 127), 0 * first
    if coded.of_rows:
        each = 128 * first.shape[1] // coded.codes.shape[1]
        scale = first * spread(coded.of_rows[0], each)
        if fmt is Format.Q6_K:
            return scale, -32 * scale
        return scale, -coded.of_groups[1].astype(np.float32) * spread(coded.of_rows[1], each)
    if len(coded.of_groups) == 2:
        second = coded.of_groups[1].astype(np.float32)
        return first, -second * first if fmt.value.endswith("z") else second
    return first, -{Format.Q8: 128, Format.Q5_0: 16}.get(fmt, 8) * first


def encoded_run(
    spec: ModelSpec, checkpoint: Checkpoint, stage: Stage, run: TileRun, layer: int | None,
    expert: int | None = None,
) -> Coded:  # fmt: skip
    """In place of `coded_run`: as if the checkpoint stored its matrices in the format of their stage."""
    source, (start, stop) = source_of(spec, run.part.role, layer), rows_of(run)
    read = partial(checkpoint.rows, tensor_name(source, layer, expert))
    values = part_rows(spec, stage, run.part, source, read, start, stop)
    return ENCODERS[stage.format](whole_blocks(in_tiles(values, run, stage.padded_k)))
