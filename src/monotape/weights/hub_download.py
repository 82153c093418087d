"""Talks to the model hub through huggingface_hub: what a repository holds, and bringing a part of it here."""

from __future__ import annotations

import glob
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monotape.errors import CheckpointError
from monotape.weights.disk import entries, free_bytes, full_disk, is_full, remove_new

_REACH_SECONDS = 5.0  # how long a machine without network waits for the error
_TEXT_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The hub gave no answer, and why."""

    reason: str


def repository_cache(repo: str) -> Path:
    """Where huggingface_hub keeps a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def cached_snapshot(repo: str) -> Path | None:
    """The folder of the version that was fetched last. It may be incomplete."""
    reference = repository_cache(repo) / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = repository_cache(repo) / "snapshots" / reference.read_text("utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def list_files(repo: str) -> dict[str, int] | Unreachable:
    """The files of a repository and their sizes in bytes."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return Unreachable("HF_HUB_OFFLINE is set")
    try:
        info = _within(
            _REACH_SECONDS, lambda: HfApi().model_info(repo, files_metadata=True, timeout=_REACH_SECONDS)
        )
    except Exception as error:  # every version of the package raises other network errors
        return _explained(repo, error)
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def choose_files(repo: str, file: str | None, names: set[str]) -> tuple[list[str], str]:
    """What to fetch, and which part of the snapshot is the model: a GGUF file, or "" for the folder."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if file is not None:
        if file not in names:
            raise CheckpointError(f"{repo} on the hub has no file {file}.", f"It has {_some(ggufs)}.")
        return [file], file
    weights = [_SINGLE] if _SINGLE in names else [*sorted(filter(_SHARD.fullmatch, names)), _INDEX]
    if set(weights) <= names and weights != [_INDEX]:
        return sorted(_TEXT_FILES & names) + weights, ""
    if len(ggufs) == 1:
        return ggufs, ggufs[0]
    if ggufs:
        raise CheckpointError(
            f"{repo} on the hub holds {len(ggufs)} GGUF files.",
            f"Name one, as in {repo}:{ggufs[0]}; it has {_some(ggufs)}.",
        )
    raise CheckpointError(
        f"{repo} on the hub holds no model.safetensors and no GGUF file.",
        "Monotape reads those two; pickled weights are never opened.",
    )


def download(repo: str, files: list[str], sizes: dict[str, int], progress: bool) -> Path | Unreachable:
    """The snapshot folder with these files in it. A full disk leaves the cache as it was."""
    folder = repository_cache(repo)
    here = cached_snapshot(repo)
    needed = sum(sizes[name] for name in files if here is None or not (here / name).exists())
    if free_bytes(folder) < needed:
        raise full_disk(repo, needed, folder)
    before = entries(folder)
    try:
        snapshot = _keeping_reference(folder, lambda: _snapshot(repo, files, progress))
    except Exception as error:  # as in list_files
        if not is_full(error):
            return _explained(repo, error)
        remove_new(folder, before)
        raise full_disk(repo, needed, folder) from error
    missing = [name for name in files if not (snapshot / name).exists()]
    return Unreachable(f"{missing[0]} did not arrive") if missing else snapshot


def _keeping_reference(folder: Path, fetch: Callable[[], Path]) -> Path:
    """What `fetch` gives. If it fails, the cache goes on pointing at the version it had before.

    The package moves the pointer first and downloads then: without this, an interrupted pull of a new version
    would hide the complete old one.
    """
    reference = folder / "refs" / "main"
    previous = reference.read_bytes() if reference.is_file() else None
    try:
        return fetch()
    except BaseException:  # Ctrl-C too
        if previous is not None:
            reference.write_bytes(previous)
        raise


def _snapshot(repo: str, files: list[str], progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    patterns = [glob.escape(name) for name in files]
    hide = not progress and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns))
    finally:
        if hide:
            enable_progress_bars()


def _explained(repo: str, error: Exception) -> Unreachable:
    """What a failed request means: an error of the user's where it is one, else the hub is out of reach."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    response = error.response if isinstance(error, HfHubHTTPError) else None
    refused = response is not None and response.status_code in (401, 403)
    if isinstance(error, GatedRepoError) or (refused and not isinstance(error, RepositoryNotFoundError)):
        raise CheckpointError(
            f"The hub refuses {repo}: it is gated or private.",
            "Accept its licence on the hub, then run `hf auth login`.",
        ) from error
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        raise CheckpointError(
            f"{repo} is no file or folder here, and the hub has no public model of that name.",
            "Check the spelling; for a private model run `hf auth login` first.",
        ) from error
    lines = str(error).strip().splitlines() or [""]
    return Unreachable(f"{type(error).__name__}: {lines[0][:160]}".rstrip(": "))


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of `call`, or TimeoutError. Name look-ups know no timeout, so a thread waits for them."""
    result: list[Any] = []
    failure: list[Exception] = []

    def work() -> None:
        try:
            result.append(call())
        except Exception as error:  # handed to the caller
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    return result[0]


def _some(names: list[str]) -> str:
    return (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "no GGUF file"
