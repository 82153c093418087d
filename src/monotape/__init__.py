"""Monotape answers one LLM request as fast as the machine's memory allows.

Names are loaded when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monotape.engine.chat_template import ChatTemplate
    from monotape.engine.config import EngineConfig
    from monotape.engine.llm import LLM
    from monotape.engine.outputs import CompletionOutput, Delta, GenerationStats, Logprob, RequestOutput
    from monotape.engine.sampling_params import SamplingParams
    from monotape.engine.stream import TextStream
    from monotape.engine.tokenizer import Tokenizer
    from monotape.errors import MonotapeError

__version__ = "0.1.0"

_HOMES = {
    "ChatTemplate": "monotape.engine.chat_template",
    "CompletionOutput": "monotape.engine.outputs",
    "Delta": "monotape.engine.outputs",
    "EngineConfig": "monotape.engine.config",
    "GenerationStats": "monotape.engine.outputs",
    "LLM": "monotape.engine.llm",
    "Logprob": "monotape.engine.outputs",
    "MonotapeError": "monotape.errors",
    "RequestOutput": "monotape.engine.outputs",
    "SamplingParams": "monotape.engine.sampling_params",
    "TextStream": "monotape.engine.stream",
    "Tokenizer": "monotape.engine.tokenizer",
}

__all__ = [
    "LLM", "ChatTemplate", "CompletionOutput", "Delta", "EngineConfig", "GenerationStats", "Logprob",
    "MonotapeError", "RequestOutput", "SamplingParams", "TextStream", "Tokenizer", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'monotape' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
