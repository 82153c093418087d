"""The stored formats of weights that this engine can read, and how it refuses the others."""

from __future__ import annotations

from monotape.errors import CheckpointError

GGUF_MAGIC = b"GGUF"  # how every such file begins
#: Names as `Checkpoint.stored_as` gives them.
READABLE_FORMATS = frozenset({"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q6_k"})


def require_readable(source: str, name: str, stored: str) -> None:
    """Refuses a tensor whose stored format has no exact float32 reading here."""
    if stored not in READABLE_FORMATS:
        raise CheckpointError(
            f"{source}: tensor {name} is stored as {stored}, which Monotape does not read.",
            f"Convert it to one of {', '.join(sorted(READABLE_FORMATS))}.",
        )


def shown_bytes(start: bytes) -> str:
    """The first bytes of a file, for a message: as text where they are, else in hexadecimal."""
    text = start.decode("ascii", "replace")
    return f"'{text}'" if text.isprintable() and text.isascii() else f"the bytes {start.hex(' ')}"
