"""What a proxy of Ray Serve does before it passes a request on: clients meet the single server's rules there too.

Ray calls `middlewares` in every proxy that was started with VARIABLE, which `announce` sets.
"""

from __future__ import annotations

import os

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from monotape.server.api_error import ApiError
from monotape.server.http.dialect import dialect_of
from monotape.server.http.limits import Limits
from monotape.server.http.replies import send_error
from monotape.server.http.security import request_id_for

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
#: Seconds that Ray gives a proxy to start before it kills it and tries again. Its own 5 are too few on a busy machine.
PATIENCE = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30"
_ID = b"x-request-id"
_CLOSED = ("/-/routes",)  # Ray lists its applications there, to clients without a key as well


def announce() -> None:
    """Has the proxies of a Ray that this process starts call `middlewares`, with time enough to start."""
    os.environ.setdefault(VARIABLE, f"{__name__}.{middlewares.__name__}")
    os.environ.setdefault(*PATIENCE)


def middlewares() -> list[Middleware]:
    return [Middleware(Passage)]


class Passage:
    """Ray's proxy answers with the id that a request has: here every request gets one that the server would echo."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._limits = app, Limits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._limits.head_fields or size > self._limits.head_bytes:
            return await send_error(send, self._limits.headers_too_large(), dialect_of(scope))
        if scope["path"] in _CLOSED:
            error = ApiError(404, f"There is no route {scope['method']} {scope['path']}.", code="not_found")
            return await send_error(send, error, dialect_of(scope))
        others = [(name, value) for name, value in headers if name != _ID]
        scope["headers"] = [*others, (_ID, request_id_for(dict(headers)))]
        await self._app(scope, receive, send)
