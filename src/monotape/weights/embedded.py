"""The model inside the package, for machines without a network: it completes Python and does not chat."""

from __future__ import annotations

from pathlib import Path

from monotape.config import cache_dir

NAME = "embedded"
PACKED = Path(__file__).parent.parent / "embedded" / "python-32m.safetensors"
#: What it is shown with, and where that ends: a class to complete.
EXAMPLE, EXAMPLE_END = "class Point:\n    def __init__(self, x, y):\n", "\n\n\n"


def is_embedded(source: str | None) -> bool:
    """Whether that is where `folder` put it."""
    path = Path(source or "")
    return path.parent == _cache() and path.name.startswith(f"{NAME}-")


def folder() -> Path:
    """The unpacked model, made in the cache the first time."""
    from monotape.embedded.packed import unpacked  # NumPy, which commands that load nothing do without

    return unpacked(PACKED, _cache())


def _cache() -> Path:
    return cache_dir() / "models"
