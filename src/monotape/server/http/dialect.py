"""Whose words an answer is in: OpenAI's, or Anthropic's where the route or the client is Anthropic's."""

from __future__ import annotations

from typing import Literal

from starlette.types import Scope

Dialect = Literal["openai", "anthropic"]
_VERSION = b"anthropic-version"  # a header that Anthropic's own API demands, so that all its clients send it


def dialect_of(scope: Scope) -> Dialect:
    """The dialect of a request. Both companies have /v1/models, and answer it in different shapes."""
    path: str = scope["path"]
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return "anthropic" if any(name == _VERSION for name, _ in scope["headers"]) else "openai"
    return "openai"
