"""Models that are named by a path of this machine."""

from __future__ import annotations

from pathlib import Path


def local_path(model: str) -> Path | None:
    """The file or folder of that name, if there is one here."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL in it, or in an unknown user's home
        return None
