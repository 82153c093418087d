"""Every setting of the engine with its default and help text, for the LLM class and the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from monotape.errors import UsageError, did_you_mean

#: The user named no model: see weights/default.py.
DEFAULT_MODEL = "default"
DEFAULT_MODEL_TEXT = "SmolLM2, or the embedded model where there is no network"
GPU_DTYPES = ("auto", "bf16", "bfloat16", "f16", "float16", "half", "fp8", "int4", "q8", "int8")

#: Arguments of vLLM's LLM that change nothing here as long as they have these values.
ONE_DEVICE = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_prefix_caching": True,
    "trust_remote_code": False,
    "tokenizer": None,
    "revision": None,
}


def _setting(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is started with. `metadata["help"]` of each field is its help text."""

    model: str = _setting(
        DEFAULT_MODEL, "a name, a Hugging Face id, a folder or a GGUF file", metavar="MODEL"
    )
    backend: str = _setting(
        "auto",
        "what runs the model: auto (a Hopper GPU, else the CPU), cpu, cuda, hip (never run on hardware), reference",
        metavar="NAME",
    )
    dtype: str = _setting(
        "auto", "weights in memory: auto (as they are stored), f32, bf16, f16, q8, fp8, int4", metavar="TYPE"
    )
    head_dtype: str = _setting(
        "auto", "the head's weights: auto (as they are stored, or as --dtype f32, bf16, f16 or q8 says), or a type",
        metavar="TYPE",
    )  # fmt: skip
    kv_dtype: str = _setting(
        "auto", "keys and values in memory: auto (16 bits or more), fp8 (Hopper GPU)", metavar="TYPE"
    )
    max_model_len: int | None = _setting(
        None, "longest prompt and answer together, in tokens (default: what the model and memory allow)"
    )
    workers: int | None = _setting(None, "threads that compute (default: one per core)")
    tp: int | None = _setting(
        None, "ranks that share the model (default: as many as the model has lanes, else 1)"
    )
    emulate_ranks: bool = _setting(
        False, "let ranks share one GPU, each with memory of its own (on a CPU they always share the machine)"
    )
    speculation: bool = _setting(
        True,
        "check several tokens in one pass where earlier text says what may follow; the answer is the same",
    )
    seed: int | None = _setting(None, "makes the seeds that are drawn for requests repeatable")
    chat_template: str | None = _setting(
        None, "a template file, or a template, instead of the model's own", metavar="FILE"
    )
    max_sequences: int = _setting(
        64, "conversations whose KV is kept for the next turn, as far as its memory goes"
    )
    kv_bytes: int | None = _setting(
        None,
        "memory for the KV of kept conversations (default: a quarter of the machine's, or half of a GPU's free)",
        metavar="BYTES",
    )
    progress: bool = _setting(True, "show progress on a terminal while loading")

    def __post_init__(self) -> None:
        for name in ("model", "backend", "dtype", "head_dtype", "kv_dtype"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise UsageError(f"{name} is {getattr(self, name)!r}.", "It must be a name.")
        for name in ("emulate_ranks", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}.", "It must be true or false.")
        bounds = {
            "max_model_len": (1, 2**31 - 1), "workers": (1, 1024), "seed": (0, 2**64 - 1),
            "max_sequences": (1, 1024), "kv_bytes": (0, 2**63 - 1), "tp": (1, 64),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is None and name != "max_sequences":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}.", f"It must be an integer from {low} to {high}.")

    @property
    def kv_budget(self) -> int:
        """Bytes of KV that may be kept."""
        return memory_bytes() // 4 if self.kv_bytes is None else self.kv_bytes


def with_model(config: EngineConfig) -> EngineConfig:
    """The same with a model's name where the user gave none; that may fetch the model."""
    if config.model != DEFAULT_MODEL:
        return config
    from monotape.weights.default import default_model

    return replace(config, model=default_model(config.progress))


def may_use_gpu(backend: str, dtype: str, workers: int | None) -> bool:
    """Whether a GPU would run this if there is one: it is asked for, or nothing is asked for that only cores can do."""
    return backend == "cuda" or (backend == "auto" and workers is None and dtype in GPU_DTYPES)


def memory_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_unknown(arguments: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuses arguments that the engine does not have; vLLM's pass where they ask for behaviour that is so anyway."""
    for name, value in arguments.items():
        if name not in ONE_DEVICE:
            raise UsageError(
                f"LLM has no argument '{name}'.",
                f"{did_you_mean(name, known)}It has: {', '.join(known)}.",
            )
        if value != ONE_DEVICE[name]:
            hint = (
                f"Use tp={value!r}."
                if name == "tensor_parallel_size"
                else f"Leave it out, or use {ONE_DEVICE[name]!r}."
            )
            raise UsageError(f"{name}={value!r} is not supported.", hint)
