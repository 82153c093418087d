"""What earlier downloads left on this machine: models with their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from monotape.config import cache_dir
from monotape.errors import CheckpointError
from monotape.weights import wheel
from monotape.weights.hub_download import cached_snapshot, repository_cache
from monotape.weights.hub_names import SHORT_NAMES
from monotape.weights.safetensors_folder import weight_files

REPOSITORY_PREFIX = "models--"


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


def _of_wheels() -> Iterator[CachedModel]:
    path = wheel.cached(wheel.SMOLLM2, wheel_folder())
    if path is not None:
        (name,) = SHORT_NAMES
        yield CachedModel(name, path.stat().st_size, path.stat().st_mtime, path, True)


def _of_hub() -> Iterator[CachedModel]:
    root = repository_cache("a/b").parent
    for folder in root.glob(f"{REPOSITORY_PREFIX}*--*") if root.is_dir() else ():
        repo = folder.name.removeprefix(REPOSITORY_PREFIX).replace("--", "/", 1)
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


def model_in(snapshot: Path, file: str | None) -> Path | None:
    """The model in a snapshot; None if it is not all there."""
    if file is not None:
        return snapshot / file if (snapshot / file).is_file() else None
    try:
        weight_files(snapshot)
    except CheckpointError:
        ggufs = list(snapshot.rglob("*.gguf"))
        return ggufs[0] if len(ggufs) == 1 else None
    return snapshot if (snapshot / "config.json").is_file() else None


def wheel_folder() -> Path:
    return cache_dir() / "models"
