"""A request on its way from the front to a replica, and the answer on its way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

#: Stands among the messages of an answer where the engine begins: from here on the request cannot be sent elsewhere.
STARTED = "started"
#: Messages of ASGI, and STARTED, in the order in which they were sent.
Batch = list[Mapping[str, Any] | str]


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a conversation: `key` stands for it and everything before it, `end` is the size of all that."""

    key: int
    end: int
    common: bool = False  # tools and instructions, which other conversations have as well


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request that has passed the access checks, whole."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    request_id: str
    units: tuple[Unit, ...] = field(default=())  # the router's business; empty where nothing is cached

    def scope(self) -> Scope:
        """The scope that the routes of the server expect."""
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method,
            "scheme": "http", "path": self.path, "raw_path": self.path.encode(), "root_path": "",
            "query_string": self.query, "headers": list(self.headers), "client": None, "server": None,
            "state": {"request_id": self.request_id},
        }  # fmt: skip
