"""A checkpoint some of whose matrices are read from elsewhere: rounded, or with rows and columns in another order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from monotape.weights.checkpoint import Checkpoint, Quantised
from monotape.weights.forwarding import ForwardingCheckpoint
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.raw import RawMatrix


class ReplacingCheckpoint(ForwardingCheckpoint):
    """`_matrices` take the place of the matrices of their names, so nothing of those is read from the file as it is."""

    def __init__(self, checkpoint: Checkpoint, matrices: Mapping[str, StoredMatrix]) -> None:
        super().__init__(checkpoint)
        self._matrices = dict(matrices)

    def stored_matrix(self, name: str) -> Quantised | None:
        matrix = self._matrices.get(name)
        return super().stored_matrix(name) if matrix is None else matrix

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        matrix = self._matrices.get(name)
        return super().rows(name, start, stop) if matrix is None else matrix.dequantised(start, stop)

    def raw_matrix(self, name: str) -> RawMatrix | None:
        return None if name in self._matrices else super().raw_matrix(name)

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return super().integer_rows(name, start, stop)
        return matrix.as_q8(start, stop) if matrix.fits_q8() else None

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        return None if name in self._matrices else super().half_rows(name, start, stop)

    def mapped_halves(self, name: str) -> NDArray[np.uint16] | None:
        return None if name in self._matrices else super().mapped_halves(name)
