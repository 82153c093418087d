"""The last event of a stream whose writer is gone: nothing is known of it but its route."""

from __future__ import annotations

from monotape.server.api_error import ApiError
from monotape.server.apis import messages, openai_frame
from monotape.server.http.replies import sse


def broken(path: str, error: ApiError, sequence_number: int) -> bytes:
    """The event that says why. `sequence_number` counts the events of a response, which are numbered."""
    if path == "/v1/messages":
        return messages.failure(error)
    if path == "/v1/responses":
        said = {"code": error.code, "message": error.message, "param": error.param}
        return sse({"type": "error", "sequence_number": sequence_number, **said}, "error")
    return openai_frame.failure(error)
