"""The groups of columns that a file has sorted by activation: which group each column of the matrix is in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.quantised.stored import DAMAGED
from monotape.weights.quantised.tensors import RawTensor


def groups_of_columns(index: RawTensor, columns: int, groups: int) -> NDArray[np.int32] | None:
    """The stored group of each column, all groups alike in size; None where column k is in group k // size."""
    index.require((columns,), f"a matrix of {columns} columns")
    found = index.array().astype(np.int64)
    if found.min() < 0 or found.max() >= groups:
        raise CheckpointError(
            f"Tensor {index.name} names groups from {found.min()} to {found.max()}, but there are {groups}.",
            DAMAGED,
        )
    size = columns // groups
    counts = np.bincount(found, minlength=groups)
    if (counts != size).any():
        wrong = int(np.argmax(counts != size))
        raise CheckpointError(
            f"Tensor {index.name} puts {counts[wrong]} columns into group {wrong}, but groups have {size}.",
            DAMAGED,
        )
    if np.array_equal(found, np.arange(columns) // size):
        return None
    return found.astype(np.int32)
