"""Messages between processes on one socket: a four-byte length, and the message as msgpack."""

from __future__ import annotations

import struct

import msgspec

HEADER = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body
