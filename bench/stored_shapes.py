"""Named shapes whose random weights are stored quantised, as checkpoints of that format would have them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.weights.checkpoint import Quantised
from monotape.weights.quantised.k_matrix import KMatrix, KRows
from monotape.weights.quantised.stored import Kind, StoredMatrix
from shapes import RandomCheckpoint

_POOL = 1 << 22
_HEAD = ("lm_head.weight", "model.embed_tokens.weight")
#: Integers and small floats in groups: what a code is, and the columns that share a scale (0: all of a row).
_GROUPS = {
    "fp8-channel": (Kind.E4M3, 0), "int4-g128": (Kind.INT4, 128), "int4-g32": (Kind.INT4, 32), "q8_0": (Kind.INT8, 32),
    "mxfp4": (Kind.E2M1, 32),
}  # fmt: skip
_K_QUANTS = {"q4_k": 16, "q5_k": 32, "q6_k": 64}  # by the number of their codes
STORED = (*_GROUPS, *_K_QUANTS)


class StoredShape(RandomCheckpoint):
    """`layers` and `head` are formats of STORED; None: bf16. Codes are cut out of one ring of random bytes."""

    def __init__(self, name: str, layers: str | None, head: str | None, *, skewed: bool = False) -> None:
        super().__init__(name, skewed=skewed)
        self._stored = layers, head
        bytes_ = np.random.default_rng(0).integers(0, 256, _POOL, np.uint8)
        self._bytes = np.tile(bytes_, 2)

    def _format(self, name: str) -> str | None:
        """Routers are 16-bit floats in every file, and gpt-oss keeps all but its experts so."""
        if len(self.shape(name)) < 2 or name in self._routers:
            return None
        layers, head = self._stored
        shared = self._spec.experts is not None and ".experts." not in name
        return head if name in _HEAD else None if layers == "mxfp4" and shared else layers

    def stored_as(self, name: str) -> str:
        return self._format(name) or super().stored_as(name)

    def stored_matrix(self, name: str) -> Quantised | None:  # type: ignore[override]
        stored, shape = self._format(name), self.shape(name)
        if stored is None:
            return None
        if stored in _K_QUANTS:
            return KMatrix(name, (shape[0], shape[1]), stored, self._k_rows(name, _K_QUANTS[stored]))
        kind, group = _GROUPS[stored]
        columns = shape[1]
        scale_kind, scale = _scale(kind, columns)
        groups = -(-columns // (group or columns))
        return StoredMatrix(
            name, shape, kind, (1, group or columns), scale_kind, self._codes(name, kind),
            lambda start, stop: np.full((stop - start, groups), scale), name_of_format=stored,
        )  # fmt: skip

    def _slice(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        columns = self.shape(name)[1]
        first = (zlib.crc32(name.encode()) + start * columns) % _POOL
        return np.resize(self._bytes[first : first + _POOL], (stop - start) * columns).reshape(-1, columns)

    def _codes(self, name: str, kind: Kind) -> Callable[[int, int], NDArray[np.uint8]]:
        def read(start: int, stop: int) -> NDArray[np.uint8]:
            codes = self._slice(name, start, stop)
            if kind is Kind.E4M3:
                return codes & np.uint8(0xBF)  # no NaN, and no number above 3.75
            return codes if kind is Kind.INT8 else codes & np.uint8(15)

        return read

    def _k_rows(self, name: str, codes: int) -> Callable[[int, int], KRows]:
        columns = self.shape(name)[1]
        d = np.float16(columns**-0.5 / 30 / (codes // 4))

        def read(start: int, stop: int) -> KRows:
            rows = stop - start
            scales = np.full((rows, -(-columns // 16)), 30, np.int8)
            of_rows = np.full((rows, -(-columns // 256)), d)
            middle = np.float16(codes // 2)
            return KRows(
                self._slice(name, start, stop) & np.uint8(codes - 1),
                scales,
                scales,
                of_rows,
                of_rows * middle,
            )

        return read


def _scale(kind: Kind, columns: int) -> tuple[str, Any]:
    """One that keeps activations finite."""
    if kind is Kind.E4M3:
        return "f32", np.float32(columns**-0.5)
    if kind is Kind.E2M1:
        return "e8m0", np.uint8(127 + round(np.log2(columns**-0.5 / 3)))
    return "f16", np.float16(columns**-0.5 / (70 if kind is Kind.INT8 else 4.6))
