"""A matrix as it lies in the mapped file, for native code that reads it there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import Format

RAW_KINDS = ("bf16", "f16", "q4_0", "q4_1", "q5_0", "q8_0", "mxfp4", "q4_k", "q5_k", "q6_k")


@dataclass(frozen=True, slots=True, eq=False)
class RawMatrix:
    """A view that costs nothing. `kind` is one of RAW_KINDS."""

    kind: str
    rows: NDArray[np.uint8]  # [rows, bytes of a row]
    columns: int  # values of a row
    head_dim: int = (
        0  # of heads whose rotary pairs lie side by side: another order than is asked for; 0: in order
    )
    rounds_to: Format | None = None  # what its 16-bit floats are to be rounded to
