"""Errors as clients see them. Their status, type, code and wording are part of the interface: agents match on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from monotape.errors import ContextOverflow, MonotapeError

#: Type of error by status, in OpenAI's words and in Anthropic's.
OPENAI_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error",
    431: "invalid_request_error", 500: "server_error", 503: "server_error",
}  # fmt: skip
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_message: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})
        self._anthropic_message = anthropic_message or message

    def openai(self) -> dict[str, Any]:
        error = {
            "message": self.message, "type": OPENAI_TYPES[self.status], "param": self.param, "code": self.code
        }  # fmt: skip
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        return {
            "type": "error",
            "error": {"type": ANTHROPIC_TYPES[self.status], "message": self._anthropic_message},
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def from_engine_error(error: MonotapeError, known: frozenset[str] = frozenset()) -> ApiError:
    """A request that the engine refuses. The field it names, if it names one first, is the param."""
    message = f"{error.message} {error.hint}".strip()
    if isinstance(error, ContextOverflow):
        return ApiError(
            400, message, code="context_length_exceeded", param="messages",
            anthropic_message=_too_long(error),
        )  # fmt: skip
    named = re.match(r"[a-z_]+", error.message)
    param = named.group() if named and named.group() in known else None
    return bad_request(message, param)


def _too_long(error: ContextOverflow) -> str:
    """Anthropic's words, from which Claude Code learns that it must shorten a conversation, and by how much."""
    least = "" if error.exact else "at least "
    # One position at least is for the answer, so the longest prompt is one token shorter than the context.
    return f"prompt is too long: {least}{error.prompt_tokens} tokens > {error.context - 1} maximum"


def too_deep() -> ApiError:
    """A body whose lists and objects lie deeper in each other than the stack is."""
    return bad_request(
        "The request is nested too deeply. Use fewer levels of lists and objects.", code="invalid_value"
    )


def from_validation(message: str) -> ApiError:
    """A body that does not have the right shape: msgspec's words, and the field they point at."""
    found = re.search(r" - at `\$\.?([^`]*)`", message)
    param = found.group(1) if found else None
    text = re.sub(r" - at `\$\.?[^`]*`", "", message).replace("`", "'")
    where = f" ({param})" if param else ""
    return bad_request(f"The request is not valid{where}: {text}.", param or None, "invalid_value")
