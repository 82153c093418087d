"""From the quantization_config of a config.json to the method that reads its weights; others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monotape.errors import ModelError, UnsupportedModel
from monotape.models.fields import Fields
from monotape.weights.quantised.awq import read_awq
from monotape.weights.quantised.compressed import read_compressed
from monotape.weights.quantised.fp8 import read_fp8
from monotape.weights.quantised.gptq import read_gptq
from monotape.weights.quantised.method import Method
from monotape.weights.quantised.mxfp4 import read_mxfp4

#: The field of config.json; the second is its name in early files of compressed-tensors.
SECTIONS = ("quantization_config", "compression_config")
READERS: Mapping[str, Callable[[Fields], Method]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
_USE = "Use the 16-bit model, or one stored as FP8, compressed-tensors, AWQ, GPTQ or GGUF"
#: What to use instead of methods that are not read.
_INSTEAD: Mapping[str, str] = {
    "bitsandbytes": f"{_USE}; `dequantize()` in transformers makes a 16-bit model of this one.",
    "torchao": f"{_USE}; torchao keeps its tensors as Python objects.",
    "fbgemm_fp8": f"{_USE}; the FP8 files of compressed-tensors hold the same numbers.",
    "modelopt": f"{_USE}; llm-compressor writes the same formats as compressed-tensors.",
    "auto-round": f"{_USE}; auto-round itself exports to the formats auto_gptq and auto_awq.",
    "gguf": "Pass the GGUF file itself.",
}


def section_of(config: Mapping[str, Any]) -> str | None:
    """The field of a config.json that says how the weights are quantised; None where they are not."""
    found = [name for name in SECTIONS if config.get(name) is not None]
    if len(found) > 1:
        raise ModelError(
            f"config.json has {' and '.join(found)}, which say the same thing.",
            "Remove the one that is wrong.",
        )
    return found[0] if found else None


def read_method(config: Mapping[str, Any]) -> Method:
    """The method that the config names, with all its fields understood."""
    section = section_of(config)
    assert section is not None, "a config without a quantisation"
    fields = Fields(config).table(section)
    assert fields is not None
    method = _named(fields) or _old_name(fields)
    if method is None:
        raise ModelError(f"config.json: {section} names no quant_method.", f"Read: {', '.join(READERS)}.")
    if method not in READERS:
        raise unread(method)
    return READERS[method](fields)


def _named(fields: Fields) -> str | None:
    """The method by either name of the field: newer versions of GPTQModel write `method` beside `quant_method`."""
    names = [fields.optional_text("quant_method"), fields.optional_text("method")]
    if None not in names and names[0] != names[1]:
        raise fields.wrong("method", f"quant_method is {names[0]}")
    return names[0] or names[1]


def unread(method: str) -> UnsupportedModel:
    """The refusal of a method by its name, with what to use instead."""
    return UnsupportedModel(
        f"The weights are quantised with {method}, which Monotape does not read.",
        _INSTEAD.get(method, f"{_USE}."),
    )


def _old_name(fields: Fields) -> str | None:
    """Early files of bitsandbytes did not say what they were."""
    return "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & set(fields.keys()) else None
