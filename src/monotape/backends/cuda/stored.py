"""Packs pieces of tapes natively from the mapped file, whatever its format and the tape's: GGUF blocks as they are,
16-bit floats as they are or rounded. One call a piece, in which Python's lock is free."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_double, c_int64, c_uint16, c_void_p
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.blocks import EXPONENT
from monotape.backends.cuda.cuts import Cut, TileSpan
from monotape.backends.cuda.native_tiles import FORMATS, knows_layout, native_library
from monotape.backends.cuda.packing import Layers, Pack, Scales
from monotape.backends.cuda.packing import pack_table as plain_table
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.gpu_formats import scale_name
from monotape.plan.types import Stage
from monotape.weights.check import require_finite
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.raw import RawMatrix
from monotape.weights.rounded import RoundedCheckpoint
from monotape.weights.tapes import Bytes, TileRun, refuse_row, rows_of, source_of, tensor_name, tile_runs

#: native/gguf_row.h: Kind, after halves that are moved.
KINDS = ("bf16", "f16", "q4_0", "q4_1", "q5_0", "q8_0", "mxfp4", "q4_k", "q5_k", "q6_k")
_HALF = 0
_RUN_FIELDS = (
    "tensor", "first_row", "rows", "first_k", "k", "padded_k", "at", "step", "format", "scales", "layer_scales",
    "tile_scales",
)  # fmt: skip


@cache
def pack_function() -> Any:
    """The native function; None where it cannot be built or loaded."""
    if (library := native_library()) is None:
        return None
    function = library.monotape_pack_stored
    function.restype = c_int64
    function.argtypes = [c_void_p, c_int64, c_void_p, *[c_int64] * 4, c_uint16, *[c_void_p] * 3]
    return function


@cache
def _round_function() -> Any:
    if (library := native_library()) is None:
        return None
    function = library.monotape_round_rows
    function.restype = None
    function.argtypes = [c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p]
    return function


def round_rows(fmt: Format, values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
    """What weights/rounding.py defines, natively; None where there is no native code."""
    if _round_function() is None:
        return None
    exact = np.ascontiguousarray(values, np.float32)
    rows, columns = exact.shape
    codes = np.empty((rows, columns), np.uint8)
    width = {Format.FP8: columns, Format.Q8: 32, Format.INT4_G128: 128}[fmt]
    dtype: Any = np.float32 if fmt is Format.FP8 else np.float16
    scales = np.empty((rows, -(-columns // width)), dtype)
    _round_function()(
        1 + FORMATS.index(fmt), exact.ctypes.data, rows, columns, codes.ctypes.data, scales.ctypes.data
    )
    return codes, scales


@cache
def _unpack_function() -> Any:
    if (library := native_library()) is None:
        return None
    function = library.monotape_unpack_rows
    function.restype = c_int64
    function.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p]
    return function


def pack_table(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, start: int, stop: int, out: Bytes
) -> None:
    """Rows of an embedding that is no head, as 16-bit floats: natively where they are blocks of a GGUF file."""
    source = source_of(spec, "embedding", None)
    raw = checkpoint.raw_matrix(source.name)
    if raw is None or raw.kind in ("bf16", "f16") or _unpack_function() is None:
        plain_table(spec, fmt, checkpoint, start, stop, out)
        return
    assert out.flags.c_contiguous and out.nbytes == 2 * (stop - start) * raw.columns
    table = np.array(_source(raw), np.int64)
    bad = _unpack_function()(table.ctypes.data, start, stop - start, fmt is Format.BF16, out.ctypes.data)
    if bad >= 0:
        refuse_row(checkpoint, source.name, start + bad, fmt)


def _source(raw: RawMatrix) -> tuple[int, ...]:
    """native/stored.cpp: Source."""
    moved = raw.kind in ("bf16", "f16") and raw.rounds_to is None
    kind = _HALF if moved else 1 + KINDS.index(raw.kind)
    return raw.rows.ctypes.data, raw.rows.shape[1], raw.columns, kind, raw.head_dim


def stored_packing(
    spec: ModelSpec, checkpoint: Checkpoint, stages: Sequence[Stage], layers: Layers, scales: Scales
) -> StoredPacking | None:
    """None where a tensor of these stages lies in the file as native code does not read it."""
    halves = {stage.format for stage in stages if stage.format.is_half}
    if pack_function() is None or len(halves) > 1 or not all(knows_layout(stage.format) for stage in stages):
        return None
    tensors: dict[str, list[RawMatrix]] = {}
    for stage, part in ((each, part) for each in stages for part in each.parts):
        source = source_of(spec, part.role, layers[0])
        turned = spec.rope.interleaved and part.role in ("q", "k")
        if turned or source.side_by_side:
            return None
        found = [checkpoint.raw_matrix(tensor_name(source, layer)) for layer in layers]
        tensors[part.role] = [raw for raw in found if raw is not None and _reads(stage.format, raw)]
        if len(tensors[part.role]) < len(layers):
            return None
    return StoredPacking(spec, checkpoint, tensors, layers, scales, halves.pop() if halves else Format.BF16)


def _reads(fmt: Format, raw: RawMatrix) -> bool:
    """16-bit floats are moved or rounded; which codes fit a format has been decided with the plan."""
    if raw.kind not in ("bf16", "f16"):
        return fmt in FORMATS
    if raw.rounds_to is None:
        return raw.kind == fmt.value
    return fmt in (Format.FP8, Format.Q8, Format.INT4_G128, Format.INT4_G64, Format.INT4_G32)


def _groups(run: TileRun) -> Iterator[tuple[int, int, int]]:
    """(first row, end, first tile) of rows that go at once: heads that do not fill their tiles go one by one."""
    (start, stop), group = rows_of(run), run.part.group
    if group == run.part.rows or group % TILE_ROWS == 0:
        group = stop - start
    for number in range((stop - start) // group):
        yield start + number * group, start + (number + 1) * group, number * -(-group // TILE_ROWS)


class StoredPacking:
    """For weights that native code reads as they are stored."""

    threads = 16

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, tensors: dict[str, list[RawMatrix]], layers: Layers,
        scales: Scales, half: Format,
    ) -> None:  # fmt: skip
        self._checkpoint, self._scales, self._half = checkpoint, scales, half
        self._origins = {role: source_of(spec, role, layers[0]) for role in tensors}
        self._tensors = tensors  # kept, because the addresses are theirs
        self._roles = list(tensors)
        by_layer = zip(*tensors.values(), strict=True)
        self._sources = np.array([[_source(raw) for raw in layer] for layer in by_layer], np.int64)

    def of_cut(self, cut: Cut) -> Pack:
        runs = [
            self._run(item, run, *group)
            for item in cut.spans
            for run in tile_runs(item.stage, item.span)
            for group in _groups(run)
        ]
        table = np.array(runs, np.int64).reshape(len(runs), len(_RUN_FIELDS))
        return partial(self._pack, cut, table, cut.gaps())

    def _run(self, item: TileSpan, run: TileRun, start: int, stop: int, tile: int) -> tuple[int, ...]:
        """Rows start..stop of a run's part; `tile` is the number of its first tile in the run."""
        part, stage, tile_bytes = run.part, item.stage, item.stage.tile_bytes
        origin, raw = self._origins[part.role], self._tensors[part.role][0]
        first = (origin.rows[0] if origin.rows else 0) + part.first + start
        assert first + stop - start <= len(raw.rows) and stage.first_k + stage.k <= raw.columns, f"{part}"
        at_tile = run.at + tile * run.step
        return (
            self._roles.index(part.role), first, stop - start, stage.first_k, stage.k, stage.padded_k,
            item.at + at_tile * tile_bytes, run.step * tile_bytes,
            _HALF if stage.format.is_half else 1 + FORMATS.index(stage.format),
            *self._scale_places(item, at_tile, run.step),
        )  # fmt: skip

    def _scale_places(self, item: TileSpan, tile: int, step: int) -> tuple[int, int, int]:
        """Where scales of its rows go: the address in layer 0, numbers from layer to layer and from tile to tile."""
        if not item.stage.layout.row_scales:
            return 0, 0, 0
        scales = self._scales[scale_name(item.stage)]
        assert scales.dtype == np.float32 and scales.flags.c_contiguous
        return (
            scales.ctypes.data + 4 * TILE_ROWS * (item.span.first + tile),
            scales.shape[1],
            TILE_ROWS * step,
        )

    def _pack(self, cut: Cut, runs: NDArray[np.int64], gaps: list[slice], layers: Layers, out: Bytes) -> None:
        assert out.flags.c_contiguous and out.nbytes == len(layers) * cut.bytes
        for gap in gaps:
            out.reshape(len(layers), cut.bytes)[:, gap] = 0
        row, costs = c_int64(), (c_double * 2)()
        bad = pack_function()(
            runs.ctypes.data, len(runs), self._sources.ctypes.data, len(self._roles), layers[0] or 0, len(layers),
            cut.bytes, EXPONENT[self._half], out.ctypes.data, ctypes.byref(row), costs,
        )  # fmt: skip
        if bad >= 0:
            self._refuse(layers[bad // len(runs)], runs[bad % len(runs)], row.value)
        self._count_costs(runs, layers, costs[0], costs[1])

    def _count_costs(self, runs: NDArray[np.int64], layers: Layers, squares: float, errors: float) -> None:
        if not isinstance(self._checkpoint, RoundedCheckpoint):
            return
        for run in runs:
            role, rows, columns = self._roles[run[0]], int(run[2]), int(run[4])
            fmt = self._tensors[role][0].rounds_to
            if fmt is not None:
                self._checkpoint.add_cost(fmt, rows * len(layers), columns, squares, errors)
                squares = errors = 0.0  # of all runs, and all are of one format: they are counted once

    def _refuse(self, layer: int | None, run: NDArray[np.int64], row: int) -> None:
        """Reads the row again in a way that says what is wrong with it."""
        number, first = int(run[0]), int(run[1]) + row
        name = tensor_name(self._origins[self._roles[number]], layer)
        require_finite(name, self._checkpoint.rows(name, first, first + 1), first)
        matrix = self._checkpoint.stored_matrix(name)
        if matrix is not None:
            matrix.dequantised(first, first + 1)
        raise AssertionError(f"row {first} of {name} was refused, and holds numbers")
