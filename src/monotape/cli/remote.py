"""A conversation with a model behind an address, in the shape in which `monotape chat` drives one of its own."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from monotape.cli.endpoint import ChatStream, Endpoint, RemoteModel
from monotape.engine.config import DEFAULT_MODEL, EngineConfig
from monotape.errors import UsageError


def decode_speed(timings: Mapping[str, Any]) -> float | None:
    """Tokens per second by the engine's own clock, in the words of Monotape, llama.cpp or vLLM."""
    for name in ("decode_tokens_per_second", "predicted_per_second", "tokens_per_second"):
        value = timings.get(name)
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """How much of the prompt was found in a cache, where the server says so."""
    details = usage.get("prompt_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return value if isinstance(value, int) else None


def drafts(usage: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many drafts the server checked and accepted, where it says so."""
    details = usage.get("completion_tokens_details")
    if not isinstance(details, Mapping):
        return None
    accepted, rejected = (details.get(f"{what}_prediction_tokens") for what in ("accepted", "rejected"))
    if not isinstance(accepted, int) or not isinstance(rejected, int):
        return None
    return accepted + rejected, accepted


class RemoteChat:
    """Stands where an LLM stands for a Conversation."""

    def __init__(self, endpoint: Endpoint, model: RemoteModel) -> None:
        self._endpoint, self._model = endpoint, model

    def stream_chat(self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]) -> ChatStream:
        return self._endpoint.stream_chat({"model": self._model.id, "messages": list(messages), **settings})


def remote_stats(stream: ChatStream) -> str:
    """How fast an answer came, in one line: what this client saw, then what the server says of itself."""
    arrivals = [chunk.time_s for chunk in stream.chunks if chunk.text or chunk.reasoning]
    tokens = stream.usage.get("completion_tokens")
    parts = [f"{tokens} tokens" if tokens is not None else "tokens not counted by the server"]
    if arrivals:
        parts.append(f"first token after {1000 * (arrivals[0] - stream.started_s):.0f} ms")
        if isinstance(tokens, int) and tokens > 1 and arrivals[-1] > arrivals[0]:
            parts.append(f"{(tokens - 1) / (arrivals[-1] - arrivals[0]):.1f} tok/s here")
    if speed := decode_speed(stream.timings):
        parts.append(f"{speed:.1f} tok/s in the engine")
    if (checked := drafts(stream.usage)) and checked[0]:
        parts.append(f"drafts: {checked[0]}, accepted {checked[1]}")
    if (prompt := stream.usage.get("prompt_tokens")) is not None:
        cached = cached_tokens(stream.usage)
        parts.append(f"prompt {prompt}" + (f" ({cached} cached)" if cached else ""))
    return " · ".join(parts)


def check_engine_flags(options: argparse.Namespace) -> None:
    """With --url the engine is the server's: flags of an engine of one's own would change nothing."""
    for field in dataclasses.fields(EngineConfig):
        given = getattr(options, field.name, field.default)
        if field.name not in ("model", "seed") and given != field.default:
            flag = ("--no-" if given is False else "--") + field.name.replace("_", "-")
            raise UsageError(
                f"{flag} does nothing with --url.", "Give it to the server instead: `monotape serve`."
            )


def asked_model(options: argparse.Namespace) -> str | None:
    """The name that was given with --model; None for the server's own choice."""
    return None if options.model == DEFAULT_MODEL else options.model
