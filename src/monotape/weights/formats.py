"""The stored formats of weights that this engine can read, and how it refuses the others."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from monotape.errors import CheckpointError

if TYPE_CHECKING:
    from monotape.weights.checkpoint import Checkpoint

GGUF_MAGIC = b"GGUF"  # how every such file begins
#: The formats of GGUF's tensors, and the floats of safetensors: names as `Checkpoint.stored_as` gives them.
READABLE_FORMATS = frozenset(
    {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", "mxfp4"}
)
CONVERT = (
    f"Convert it to a format that is read: in a GGUF file one of {', '.join(sorted(READABLE_FORMATS))}, in safetensors "
    "f32, f16, bf16 or one that a quantization_config describes."
)
#: The matrices of quantised safetensors (weights/quantised): "fp8-block", "int4-g128", "int8-channel", ...
_QUANTISED = re.compile(r"(fp8|int4|int8)-(tensor|channel|block|g\d+)|mxfp4|nvfp4")


def is_readable(stored: str) -> bool:
    """Can weights of this format be read as exact float32?"""
    return stored in READABLE_FORMATS or _QUANTISED.fullmatch(stored) is not None


def require_readable(source: str, name: str, stored: str) -> None:
    """Refuses a tensor whose stored format has no exact float32 reading here."""
    if not is_readable(stored):
        raise CheckpointError(
            f"{source}: tensor {name} is stored as {stored}, which Monotape does not read.",
            CONVERT,
        )


def stored_formats(checkpoint: Checkpoint) -> dict[str, float]:
    """The share of the weights that each stored format has, the largest first."""
    counts: dict[str, int] = {}
    for name in checkpoint.names:
        stored = checkpoint.stored_as(name)
        counts[stored] = counts.get(stored, 0) + prod(checkpoint.shape(name))
    total = max(1, sum(counts.values()))
    return {
        name: count / total for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    }


def shown_bytes(start: bytes) -> str:
    """The first bytes of a file, for a message: as text where they are, else in hexadecimal."""
    text = start.decode("ascii", "replace")
    return f"'{text}'" if text.isprintable() and text.isascii() else f"the bytes {start.hex(' ')}"
