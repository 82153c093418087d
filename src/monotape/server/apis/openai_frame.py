"""What OpenAI's completions and chat completions have around their choices, and how their streams end."""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.types import Scope

from monotape.server.api_error import ApiError
from monotape.server.http.replies import sse
from monotape.server.service.clock import Clock
from monotape.server.service.service import Service

DONE = b"data: [DONE]\n\n"


def begin(
    service: Service, scope: Scope, model: str | None, prefix: str, kind: str
) -> tuple[Clock, dict[str, Any]]:
    """The clock of a request that may be answered, and the head of its answer."""
    clock, name = service.receive(scope["state"], model)
    identity = f"{prefix}-{secrets.token_hex(12)}"
    return clock, {"id": identity, "object": kind, "created": int(time.time()), "model": name}


def whole(
    head: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, Any], clock: Clock
) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    figures = {"usage": usage, "metrics": clock.metrics(), "timings": clock.timings()}
    return {**head, "choices": choices, **figures}


def failure(error: ApiError) -> bytes:
    """How a stream that has begun says that it cannot go on."""
    return sse(error.openai()) + DONE
