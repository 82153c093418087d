"""Columns that a file has sorted by activation (GPTQ's desc_act), put into the order of their groups.

The columns of a matrix can be sorted if the matrices that make its input can have their rows in the same order. That
holds for `down`, whose input is made by `gate` and `up`, one row a value. It does not hold for matrices that read the
residual, whose order all layers share, nor for `output`, whose input lies in heads: these are left as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.models.spec import ModelSpec
from monotape.weights.checkpoint import Checkpoint, Quantised
from monotape.weights.quantised.packing import Codes, nibbles
from monotape.weights.quantised.stored import Kind, StoredMatrix
from monotape.weights.replacing import ReplacingCheckpoint
from monotape.weights.tapes import source_of, tensor_name

Order = NDArray[np.int64]
_PRODUCERS = ("gate", "up")
_CHUNK_ROWS = 512  # read at once


def with_sorted_columns(spec: ModelSpec, checkpoint: Checkpoint) -> Checkpoint:
    """The same model with the columns of `down` sorted by group in the layers where that is possible."""
    if spec.experts is not None or spec.lanes is not None:
        return checkpoint
    roles = ("down", *_PRODUCERS)
    sources = {role: spec.layer_tensors.get(role) for role in roles}
    whole = all(source is not None and source.rows is None for source in sources.values())
    if not whole or any(f"{role}_bias" in spec.layer_tensors for role in _PRODUCERS):
        return checkpoint
    found: dict[str, tuple[StoredMatrix, _Rows | None]] = {}
    for layer in range(spec.layers):
        names = {role: tensor_name(source_of(spec, role, layer), layer) for role in roles}
        found |= _sorted(names, {role: checkpoint.stored_matrix(names[role]) for role in roles})
    return SortedCheckpoint(checkpoint, found) if found else checkpoint


def _sorted(
    names: Mapping[str, str], matrices: Mapping[str, Quantised | None]
) -> dict[str, tuple[StoredMatrix, _Rows | None]]:
    """The three matrices of a layer in their new order, by name; none where they stay as they are."""
    down = matrices["down"]
    if not isinstance(down, StoredMatrix) or (order := down.order) is None:
        return {}
    found: dict[str, tuple[StoredMatrix, _Rows | None]] = {names["down"]: (_with_columns(down, order), None)}
    for role in _PRODUCERS:
        matrix = matrices[role]
        if not isinstance(matrix, StoredMatrix) or matrix.group[0] != 1 or matrix.rows != len(order):
            return {}
        rows = _Rows(matrix, order)
        found[names[role]] = (rows.matrix(), rows)
    return found


def _with_columns(matrix: StoredMatrix, order: Order) -> StoredMatrix:
    """Sorted by group: column k is in group k // size, because all groups are alike in size."""
    return replace(
        matrix,
        read_values=lambda start, stop: np.take(matrix.read_values(start, stop), order, axis=1),
        group_of=None,
    )


class _Rows:
    """The rows of a matrix in another order. They are read once, in the order of the file, when one is needed."""

    def __init__(self, matrix: StoredMatrix, order: Order) -> None:
        self._matrix, self._order = matrix, order
        self._lock = threading.Lock()
        self._parts: dict[str, NDArray[Any]] | None = None

    def matrix(self) -> StoredMatrix:
        zeros = self._matrix.read_zeros
        return replace(
            self._matrix,
            read_values=self._values,
            read_scales=lambda start, stop: self._part("scales")[start:stop],
            read_zeros=None if zeros is None else self._zeros,
            read_mins=(
                None if self._matrix.read_mins is None else lambda start, stop: self._part("mins")[start:stop]
            ),
        )

    def _values(self, start: int, stop: int) -> Codes:
        found: Codes = self._part("values")[start:stop]
        return nibbles(found) if self._in_nibbles else found

    def _zeros(self, start: int, stop: int) -> Codes | None:
        return None if self._matrix.symmetric else self._part("zeros")[start:stop]

    @property
    def _in_nibbles(self) -> bool:
        return self._matrix.kind in (Kind.INT4, Kind.E2M1) and self._matrix.columns % 2 == 0

    def _part(self, name: str) -> NDArray[Any]:
        with self._lock:
            if self._parts is None:
                self._parts = self._read()
            return self._parts[name]

    def _read(self) -> dict[str, NDArray[Any]]:
        """All rows, codes of four bits two a byte: no more memory than the file takes."""
        matrix, places = self._matrix, np.argsort(self._order)
        parts: dict[str, NDArray[Any]] = {}
        for start in range(0, matrix.rows, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, matrix.rows)
            codes = matrix.values(start, stop)
            if self._in_nibbles:
                codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
            read: dict[str, NDArray[Any] | None] = {
                "values": codes, "scales": matrix.scales(start, stop), "zeros": matrix.zeros(start, stop),
                "mins": matrix.mins(start, stop),
            }  # fmt: skip
            for name, rows in read.items():
                if rows is not None:
                    if name not in parts:
                        parts[name] = np.empty((matrix.rows, rows.shape[1]), rows.dtype)
                    parts[name][places[start:stop]] = rows
        return parts

    def release(self) -> None:
        with self._lock:
            self._parts = None


class SortedCheckpoint(ReplacingCheckpoint):
    """A checkpoint some of whose matrices have their columns or rows in another order, by name."""

    def __init__(
        self, checkpoint: Checkpoint, found: Mapping[str, tuple[StoredMatrix, _Rows | None]]
    ) -> None:
        super().__init__(checkpoint, {name: matrix for name, (matrix, _) in found.items()})
        self._rows = {name: rows for name, (_, rows) in found.items() if rows is not None}

    def release(self, name: str) -> None:
        super().release(name)
        if name in self._rows:
            self._rows[name].release()
