"""Removes what earlier downloads left on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from monotape.errors import CheckpointError, ResourceError, near
from monotape.weights.cache import REPOSITORY_PREFIX, CachedModel, cached_models
from monotape.weights.hub_names import SHORT_NAMES, parsed


def remove(name: str) -> list[CachedModel]:
    """Removes the models cached under a name and returns them. A short name stands for all files of its repository."""
    known = cached_models()
    found = [model for model in known if _is_of(name, model.name)]
    if not found:
        meant = near(name, [model.name for model in known])
        raise CheckpointError(
            f"{name} is not in the cache.", f"Did you mean '{meant}'?" if meant else "See `monotape list`."
        )
    for model in found:
        _delete(model)
    return found


def _is_of(name: str, cached: str) -> bool:
    wanted = parsed(name)
    if wanted is None:  # no model has such a name
        return False
    same = {str(wanted), *(short for short, full in SHORT_NAMES.items() if full == str(wanted))}
    return cached in same or cached.startswith(f"{wanted}:")


def _delete(model: CachedModel) -> None:
    try:
        if model.path.is_dir():
            shutil.rmtree(model.path)
            shutil.rmtree(model.path.parent / ".locks" / model.path.name, ignore_errors=True)
            return
        blob = model.path.resolve()
        model.path.unlink()
        blob.unlink(missing_ok=True)
        _tidy(model.path)
    except OSError as error:
        raise ResourceError(
            f"{model.path} cannot be removed: {error.strerror or error}.", "Check its permissions."
        ) from error


def _tidy(file: Path) -> None:
    """Removes the rest of a repository whose last model file is gone."""
    folder = next((parent for parent in file.parents if parent.name.startswith(REPOSITORY_PREFIX)), None)
    if folder is not None and not any(folder.rglob("*.gguf")) and not any(folder.rglob("*.safetensors")):
        shutil.rmtree(folder)
