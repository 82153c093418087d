"""A checkpoint that passes everything on to another one; subclasses change some of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.weights.checkpoint import Checkpoint, Quantised, TextAssets
from monotape.weights.raw import RawMatrix


class ForwardingCheckpoint:
    """See checkpoint.py."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def source(self) -> str:
        return self._checkpoint.source

    @property
    def config(self) -> Mapping[str, Any]:
        return self._checkpoint.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._checkpoint.generation_config

    @property
    def text(self) -> TextAssets:
        return self._checkpoint.text

    @property
    def names(self) -> frozenset[str]:
        return self._checkpoint.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def stored_as(self, name: str) -> str:
        return self._checkpoint.stored_as(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self._checkpoint.rows(name, start, stop)

    def stored_matrix(self, name: str) -> Quantised | None:
        return self._checkpoint.stored_matrix(name)

    def raw_matrix(self, name: str) -> RawMatrix | None:
        return self._checkpoint.raw_matrix(name)

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        return self._checkpoint.integer_rows(name, start, stop)

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        return self._checkpoint.half_rows(name, start, stop)

    def mapped_halves(self, name: str) -> NDArray[np.uint16] | None:
        return self._checkpoint.mapped_halves(name)

    def release(self, name: str) -> None:
        self._checkpoint.release(name)
