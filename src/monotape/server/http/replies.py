"""Answers as bytes: JSON, server-sent events, errors in the client's own words, and the messages that send them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Message, Send

from monotape.server.api_error import ApiError
from monotape.server.http.dialect import Dialect

_encoder = msgspec.json.Encoder()


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


def encode(data: Any) -> bytes:
    """JSON; text that is not valid Unicode is mended rather than refused."""
    try:
        return _encoder.encode(data)
    except UnicodeEncodeError:
        return _encoder.encode(_mended(data))


def _mended(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "replace").decode()
    if isinstance(data, dict):
        return {_mended(key): _mended(value) for key, value in data.items()}
    return [_mended(item) for item in data] if isinstance(data, list) else data


async def send_json(
    send: Send, status: int, data: Any, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    await send_body(send, status, encode(data), "application/json", headers)


async def send_error(send: Send, error: ApiError, dialect: Dialect) -> None:
    headers = tuple((name.encode(), value.encode()) for name, value in error.headers.items())
    await send_json(send, error.status, error.openai() if dialect == "openai" else error.anthropic(), headers)


async def send_body(
    send: Send, status: int, body: bytes, content_type: str, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers
        ],
    }  # fmt: skip
    await send(start)
    await send_part(send, body, more=False)


async def send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    """A part of the body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
