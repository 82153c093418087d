"""Where a model's config comes from: the built-in table, a folder or file here, or the hub. Weights are never read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monotape.errors import CheckpointError, UsageError
from monotape.planner.catalogue import find_model, models, nearest_names
from monotape.planner.precision import Precision
from monotape.planner.shape import ATTENTION, FFN, HEAD
from monotape.weights.paths import local_path

#: Bits of a weight in a GGUF file, scales included.
_GGUF_BITS = {
    "f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q6_k": 6.5625, "q5_1": 6, "q5_0": 5.5, "q5_k": 5.5, "q4_1": 5,
    "q4_0": 4.5, "q4_k": 4.5, "q3_k": 3.4375, "q2_k": 2.625, "mxfp4": 4.25,
}  # fmt: skip
_KINDS = {".self_attn.": ATTENTION, ".mlp.": FFN, "lm_head": HEAD, "embed_tokens": HEAD}


@dataclass(frozen=True, slots=True)
class Source:
    """A config, where it comes from, and what its file says of the weights' format, if it is a weight file."""

    name: str
    config: Mapping[str, Any]
    origin: str
    stored: Precision | None = None


def find_source(model: str) -> Source:
    """The config that `model` stands for: a path, a built-in name, or a hub id (whose config alone is fetched)."""
    path = local_path(model)
    if path is not None:
        return _from_path(path)
    known = find_model(model)
    if known is not None:
        return Source(known.name, known.config, f"built-in table; {known.source}")
    if model.count("/") != 1 or model.startswith(("/", ".", "~")) or model.endswith((".json", ".gguf")):
        raise UsageError(
            f"{_shown(model)} is no file or folder here and no model of the built-in table.",
            f"The nearest names are {', '.join(nearest_names(model, models()))}; see `monotape plan --list`.",
        )
    return _from_hub(model)


def _from_path(path: Path) -> Source:
    from monotape.weights.json_file import read_object

    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".json":
        name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
        return Source(name, read_object(path), f"{path.name} of {name}")
    return _from_weights(path)


def _from_weights(path: Path) -> Source:
    """A GGUF file, or a folder with one: its header is read, none of its weights."""
    from monotape.weights.open import open_checkpoint

    checkpoint = open_checkpoint(path)
    matrices = {name: checkpoint.shape(name) for name in checkpoint.names if len(checkpoint.shape(name)) == 2}
    weights: dict[str, int] = {}
    stored: dict[str, float] = {}
    tied = "lm_head.weight" not in matrices
    for name, (rows, columns) in matrices.items():
        kind = next((kind for piece, kind in _KINDS.items() if piece in name), None)
        bits = _GGUF_BITS.get(checkpoint.stored_as(name))
        if kind is None or bits is None or ("embed_tokens" in name and not tied):
            continue
        weights[kind] = weights.get(kind, 0) + rows * columns
        stored[kind] = stored.get(kind, 0.0) + rows * columns * bits / 8
    sizes = {kind: stored[kind] / weights[kind] for kind in weights}
    shown = ", ".join(f"{kind} {8 * size:.2f} bits a weight" for kind, size in sorted(sizes.items()))
    precision = Precision("as stored", sizes, 2.0, f"as the file stores it: {shown}") if sizes else None
    return Source(path.name, checkpoint.config, f"header of {path.name}", precision)


def _from_hub(repo: str) -> Source:
    from monotape.weights.hub_download import Unreachable, cached_snapshot, download, list_files
    from monotape.weights.json_file import read_object

    cached = cached_snapshot(repo)
    if cached is not None and (cached / "config.json").is_file():
        return Source(
            repo, read_object(cached / "config.json"), f"config.json of {repo}, from the hub's cache"
        )
    found = list_files(repo)
    if not isinstance(found, Unreachable):
        if "config.json" not in found:
            raise CheckpointError(
                f"{repo} on the hub has no config.json.", "The planner needs nothing else of it."
            )
        folder = download(repo, ["config.json"], found, progress=False)
        if not isinstance(folder, Unreachable):
            return Source(repo, read_object(folder / "config.json"), f"config.json of {repo}, from the hub")
        found = folder
    raise CheckpointError(
        f"{repo} is neither built in nor cached, and the hub cannot be reached ({found.reason}).",
        "Pass the path of its config.json; the nearest built-in names are"
        f" {', '.join(nearest_names(repo, models()))}.",
    )


def _shown(model: str) -> str:
    return repr(model if len(model) <= 80 else f"{model[:77]}...")
