"""What earlier downloads left on this machine: models with their sizes, and their removal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from monotape.errors import CheckpointError, ResourceError, near
from monotape.weights import wheel
from monotape.weights.hub_download import cached_snapshot, repository_cache

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model, or a part of one that an interrupted download left."""

    name: str  # what --model takes
    bytes: int
    fetched: float  # seconds since the epoch
    path: Path  # the file, or the folder of the repository with all its versions
    complete: bool


def cached_models() -> list[CachedModel]:
    """Models in the hub's cache, which other programs share, and in Monotape's own."""
    return sorted([*_of_hub(), *_of_wheels()], key=lambda model: model.name.lower())


def remove(name: str) -> list[CachedModel]:
    """Removes what is cached under a name; what was removed. The hub's short names stand for all their files."""
    from monotape.weights.hub import SHORT_NAMES, hub_name

    wanted = hub_name(name)
    same = {str(wanted), *(short for short, full in SHORT_NAMES.items() if full == str(wanted))}
    known = cached_models()
    found = [model for model in known if model.name in same or model.name.startswith(f"{wanted}:")]
    if not found:
        meant = near(name, [model.name for model in known])
        raise CheckpointError(
            f"{name} is not in the cache.", f"Did you mean '{meant}'?" if meant else "See `monotape list`."
        )
    for model in found:
        _delete(model)
    return found


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
    folder = next((parent for parent in file.parents if parent.name.startswith(_PREFIX)), None)
    if folder is not None and not any(folder.rglob("*.gguf")) and not any(folder.rglob("*.safetensors")):
        shutil.rmtree(folder)


def _of_wheels() -> Iterator[CachedModel]:
    from monotape.weights.hub import SHORT_NAMES, wheel_folder

    path = wheel.cached(wheel.SMOLLM2, wheel_folder())
    if path is not None:
        (name,) = SHORT_NAMES
        yield CachedModel(name, path.stat().st_size, path.stat().st_mtime, path, True)


def _of_hub() -> Iterator[CachedModel]:
    from monotape.weights.hub import model_in

    root = repository_cache("a/b").parent
    for folder in root.glob(f"{_PREFIX}*--*") if root.is_dir() else ():
        repo = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
        snapshot = cached_snapshot(repo)
        model = None if snapshot is None else model_in(snapshot, None)
        if snapshot is None or model == snapshot:
            yield CachedModel(repo, _size(folder), folder.stat().st_mtime, folder, model is not None)
            continue
        ggufs = [file for file in sorted(snapshot.rglob("*.gguf")) if file.is_file()]
        for file in ggufs:  # each is a model of its own
            name = f"{repo}:{file.relative_to(snapshot)}"
            yield CachedModel(name, file.stat().st_size, file.stat().st_mtime, file, True)
        if not ggufs:
            yield CachedModel(repo, _size(folder), folder.stat().st_mtime, folder, False)


def _size(folder: Path) -> int:
    """Bytes on the disk: snapshots are links to files that are counted once, and pointers to versions are no model."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files if folder / "refs" not in path.parents)
