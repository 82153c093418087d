"""Opens the folder or file of a model; its contents decide the format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from monotape.errors import CheckpointError
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.formats import GGUF_MAGIC, shown_bytes
from monotape.weights.safetensors_folder import SafetensorsFolder
from monotape.weights.stacks import with_stacks

if TYPE_CHECKING:
    from monotape.weights.gguf_file import GgufFile

_ACCEPTED = "Monotape opens a GGUF file, or a Hugging Face folder with config.json and safetensors."
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: Ends of tensors' names that only bitsandbytes has.
_BITSANDBYTES = (".absmax", ".SCB")
_COPY = (
    "Early tools kept it in quantize_config.json or quant_config.json: copy it into config.json, with its "
    "quant_method."
)
_LOST = (
    "It is not the config.json that was saved with these weights: fetch it again. If there is a hf_quant_config.json, "
    "they are modelopt's, which are not read: use the 16-bit model, or another quantised one."
)
#: Other ends that only quantised weights have, and where to look for a quantization_config that is missing.
_QUANTISED = {
    ".qweight": _COPY, ".weight_packed": _LOST, ".weight_scale": _LOST, ".weight_scale_inv": _LOST, "_blocks": _LOST,
    "_scales": _LOST,
}  # fmt: skip
_CONVERT = "Pickle files can run code and are never opened: save the model as safetensors first."


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, its headers checked and nothing of its weights read."""
    if path.is_dir():
        return with_stacks(_open_folder(path))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.", _ACCEPTED)
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder.", _ACCEPTED)
    try:
        with path.open("rb") as file:
            start = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}.", "Check its permissions."
        ) from error
    if start == GGUF_MAGIC or path.suffix == ".gguf":
        return _gguf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} is only part of a model.", "Pass the folder that also holds its config.json."
        )
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} is a pickle file.", _CONVERT)
    raise CheckpointError(f"{path} is no model: it starts with {shown_bytes(start)}.", _ACCEPTED)


def _gguf(path: Path) -> GgufFile:
    from monotape.weights.gguf_file import GgufFile  # the whole format, which most models do not need

    return GgufFile(path)


def _safetensors(path: Path) -> Checkpoint:
    folder = SafetensorsFolder(path)
    if any(folder.config.get(name) for name in ("quantization_config", "compression_config")):
        from monotape.weights.quantised.folder import QuantisedFolder  # methods that most models do not need

        return QuantisedFolder(folder)
    _require_plain(folder)
    return folder


def _require_plain(folder: SafetensorsFolder) -> None:
    """Refuses quantised weights whose config does not say how they are quantised."""
    if any(name.endswith(_BITSANDBYTES) for name in folder.names):
        from monotape.weights.quantised.config import unread

        raise unread("bitsandbytes")
    stray = min((name for name in folder.names if name.endswith(tuple(_QUANTISED))), default=None)
    if stray is not None:
        raise CheckpointError(
            f"{folder.source} has quantised weights ({stray}), but its config.json has no quantization_config.",
            next(hint for end, hint in _QUANTISED.items() if stray.endswith(end)),
        )


def _open_folder(folder: Path) -> Checkpoint:
    try:
        files = sorted(file.name for file in folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}.", "Check its permissions."
        ) from error
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        return _safetensors(folder)
    ggufs = [name for name in files if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return _gguf(folder / ggufs[0])
    if ggufs:
        shown = ", ".join(ggufs[:8]) + (", ..." if len(ggufs) > 8 else "")
        raise CheckpointError(f"{folder} holds {len(ggufs)} GGUF files: {shown}.", "Pass the one to run.")
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(f"{folder} has its weights in {pickles[0]} only, a pickle file.", _CONVERT)
    raise CheckpointError(f"{folder} holds no weights.", _ACCEPTED)
