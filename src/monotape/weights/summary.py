"""How a model's weights are stored, in a word or two, from headers and config alone."""

from __future__ import annotations

from math import prod
from pathlib import Path

from monotape.errors import MonotapeError


def stored_summary(path: Path) -> str:
    """The format that most weights have, or the method of quantisation; "" where the files do not say."""
    try:
        if path.is_file():
            return _of_gguf(path)
        return _of_folder(path)
    except (MonotapeError, OSError):
        return ""


def _of_gguf(path: Path) -> str:
    from monotape.weights.gguf_header import read_header
    from monotape.weights.mapped import MappedFile

    counts: dict[str, int] = {}
    for tensor in read_header(MappedFile(path)).tensors.values():
        counts[tensor.stored] = counts.get(tensor.stored, 0) + prod(tensor.shape)
    return max(sorted(counts), key=counts.__getitem__, default="")


def _of_folder(folder: Path) -> str:
    from monotape.weights.json_file import read_object

    config = folder / "config.json"
    if not config.is_file():
        files = sorted(folder.glob("*.gguf"))
        return _of_gguf(files[0]) if len(files) == 1 else ""
    fields = read_object(config)
    quantised = fields.get("quantization_config")
    if isinstance(quantised, dict):
        method = quantised.get("quant_method") or quantised.get("method")
        if isinstance(method, str):
            return method
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    return names.get(str(fields.get("dtype") or fields.get("torch_dtype")), "")
