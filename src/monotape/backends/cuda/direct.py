"""Packs pieces of tapes straight from the mapped file, natively: one call a piece, in which Python's lock is free.

That lock is what many threads of NumPy calls wait for: a piece takes twenty of them, each over in microseconds. Without
a C++ compiler there is no native code, and NumPy packs everything (packing.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_uint16, c_void_p
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cpu.build import BuildError
from monotape.backends.cuda.blocks import EXPONENT, PACKERS, Halves, pack_blocks
from monotape.backends.cuda.cuts import Cut, TileSpan
from monotape.backends.cuda.library import find_library
from monotape.backends.cuda.packing import AnyPacking, Layers, Pack, Packing, Scales
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.types import Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Bytes, TileRun, refuse_row, rows_of, source_of, tensor_name, tile_runs

_RUN_FIELDS = ("tensor", "offset", "pitch", "rows", "k", "padded_k", "at", "step")
_Runs = NDArray[np.int64]  # [runs][_RUN_FIELDS], as native/blocks.cpp has them


@cache
def pack_function() -> Any:
    """The native function; None where it cannot be built or loaded."""
    try:
        function = ctypes.CDLL(str(find_library())).monotape_pack_blocks
    except (BuildError, OSError):
        return None
    function.restype = c_int64
    function.argtypes = [c_void_p, c_int64, c_void_p, *[c_int64] * 3, c_uint16, c_void_p, c_void_p]
    return function


def packing_for(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    stages: Sequence[Stage],
    layers: Layers,
    scales: Scales | None = None,
) -> Packing:
    """The quickest way to pack these stages of these layers; of the head, layers are (None,)."""
    formats = {stage.format for stage in stages}
    if len(formats) == 1 and pack_function() is not None:
        fmt = formats.pop()
        moved = PACKERS.get(fmt) is pack_blocks
        tensors = _mapped_tensors(spec, fmt, checkpoint, stages, layers) if moved else None
        if tensors is not None:
            return DirectPacking(spec, fmt, checkpoint, tensors, head=layers[0] is None)
    if any(stage.format not in PACKERS for stage in stages):
        from monotape.backends.cuda.stored import stored_packing

        native = stored_packing(spec, checkpoint, stages, layers, scales or {})
        if native is not None:
            return native
    return AnyPacking(spec, checkpoint, scales or {})


def _mapped_tensors(
    spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, stages: Sequence[Stage], layers: Layers
) -> dict[str, list[Halves]] | None:
    """The tensors of every role, one a layer, where each lies in the file as its tape will have it."""
    tensors: dict[str, list[Halves]] = {}
    for part in (part for stage in stages for part in stage.parts):
        turned = spec.rope.interleaved and part.role in ("q", "k")
        if turned or (source := source_of(spec, part.role, layers[0])).side_by_side:
            return None
        found = [_mapped(fmt, checkpoint, tensor_name(source, layer)) for layer in layers]
        tensors[part.role] = [halves for halves in found if halves is not None]
        if len(tensors[part.role]) < len(layers):
            return None
        assert len({halves.shape for halves in tensors[part.role]}) == 1, f"{part.role} differs among layers"
    return tensors


def _mapped(fmt: Format, checkpoint: Checkpoint, name: str) -> Halves | None:
    return checkpoint.mapped_halves(name) if checkpoint.stored_as(name) == fmt.value else None


def _groups(run: TileRun) -> Iterator[tuple[int, int, int]]:
    """(first row, end, first tile) of rows that go at once: heads that do not fill their tiles go one by one."""
    (start, stop), group = rows_of(run), run.part.group
    if group == run.part.rows or group % TILE_ROWS == 0:
        group = stop - start
    for number in range((stop - start) // group):
        yield start + number * group, start + (number + 1) * group, number * -(-group // TILE_ROWS)


class DirectPacking:
    """For weights that are stored as the tapes have them, row after row."""

    threads = 8  # as fast as the bus; each has pinned memory, which takes and gives back time

    def __init__(
        self, spec: ModelSpec, fmt: Format, checkpoint: Checkpoint, tensors: dict[str, list[Halves]], *, head: bool
    ) -> None:  # fmt: skip
        self._format, self._checkpoint = fmt, checkpoint
        self._sources = {role: source_of(spec, role, None if head else 0) for role in tensors}
        self._tensors = tensors  # kept, because the addresses are theirs
        self._roles = list(tensors)
        by_layer = zip(*tensors.values(), strict=True)
        self._addresses = np.array([[halves.ctypes.data for halves in layer] for layer in by_layer], np.int64)

    def of_cut(self, cut: Cut) -> Pack:
        return partial(self._pack, cut, self._runs(cut), cut.gaps())

    def _runs(self, cut: Cut) -> _Runs:
        runs = [
            self._run(item, run, *group)
            for item in cut.spans
            for run in tile_runs(item.stage, item.span)
            for group in _groups(run)
        ]
        return np.array(runs, np.int64).reshape(len(runs), len(_RUN_FIELDS))

    def _run(self, item: TileSpan, run: TileRun, start: int, stop: int, tile: int) -> tuple[int, ...]:
        """Rows start..stop of a run's part; `tile` is the number of its first tile in the run."""
        part, stage, tile_bytes = run.part, item.stage, item.stage.tile_bytes
        source, (rows, columns) = self._sources[part.role], self._tensors[part.role][0].shape
        first = (source.rows[0] if source.rows else 0) + part.first + start
        assert first + stop - start <= rows and stage.first_k + stage.k <= columns, f"{part} of {rows} rows"
        return (
            self._roles.index(part.role), 2 * (first * columns + stage.first_k), 2 * columns, stop - start,
            stage.k, stage.padded_k, item.at + (run.at + tile * run.step) * tile_bytes, run.step * tile_bytes,
        )  # fmt: skip

    def _pack(self, cut: Cut, runs: _Runs, gaps: list[slice], layers: Layers, out: Bytes) -> None:
        assert out.flags.c_contiguous and out.nbytes == len(layers) * cut.bytes
        for gap in gaps:
            out.reshape(len(layers), cut.bytes)[:, gap] = 0
        addresses, row = self._addresses[layers[0] or 0], c_int64()
        bad = pack_function()(
            runs.ctypes.data, len(runs), addresses.ctypes.data, len(self._roles), len(layers), cut.bytes,
            EXPONENT[self._format], out.ctypes.data, ctypes.byref(row),
        )  # fmt: skip
        if bad >= 0:
            self._refuse(layers[bad // len(runs)], runs[bad % len(runs)], row.value)

    def _refuse(self, layer: int | None, run: _Runs, row: int) -> None:
        values = dict(zip(_RUN_FIELDS, run.tolist(), strict=True))
        name = tensor_name(self._sources[self._roles[values["tensor"]]], layer)
        refuse_row(self._checkpoint, name, values["offset"] // values["pitch"] + row, self._format)
