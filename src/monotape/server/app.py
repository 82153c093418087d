"""The application: the table of routes, behind the checks of http/security.py."""

from __future__ import annotations

import starlette.routing
from starlette.types import ASGIApp, Receive, Scope, Send

from monotape.server.api_error import ApiError
from monotape.server.apis.routes import ROUTES
from monotape.server.config import ServerConfig
from monotape.server.http.access_log import note_error
from monotape.server.http.bodies import Bodies
from monotape.server.http.dialect import dialect_of
from monotape.server.http.endpoint import Endpoint
from monotape.server.http.replies import send_error
from monotape.server.http.security import Security
from monotape.server.service.metrics import Metrics
from monotape.server.service.service import Service


def build(service: Service) -> ASGIApp:
    """The whole server as one ASGI application."""
    return behind_checks(routes(service), service.config, service.metrics)


def behind_checks(app: ASGIApp, config: ServerConfig, metrics: Metrics) -> ASGIApp:
    """An application that answers the server's routes, behind the checks of access."""
    return Security(app, config, metrics, frozenset(route.path for route in ROUTES))


def routes(service: Service) -> ASGIApp:
    """The routes alone, for requests whose access was checked elsewhere."""
    bodies = Bodies(service.config.max_body_bytes)
    inner = starlette.routing.Router(
        [
            starlette.routing.Route(route.path, Endpoint(service, route, bodies), methods=[route.method])
            for route in ROUTES
        ],
        redirect_slashes=False,
        default=_not_found,
    )
    allowed = _methods()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        methods = allowed.get(scope["path"])
        if scope["type"] == "http" and methods is not None and scope["method"] not in methods:
            listed = ", ".join(sorted(methods))
            message = f"{scope['path']} does not take {scope['method']}. It takes {listed}."
            error = ApiError(405, message, code="method_not_allowed", headers={"allow": listed})
            return await _refuse(scope, send, error)
        await inner(scope, receive, send)

    return app


def _methods() -> dict[str, set[str]]:
    methods: dict[str, set[str]] = {}
    for route in ROUTES:
        methods.setdefault(route.path, set()).add(route.method)
        if route.method == "GET":
            methods[route.path].add("HEAD")
    return methods


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what is there instead, for routes that applications expect of a server like this one."""
    error = ApiError(404, f"There is no route {scope['method']} {scope['path'][:200]}.", code="not_found")
    if scope["path"].rpartition("/")[2] in ("embeddings", "embed"):
        message = "This engine does not make embeddings; it answers with text. Use another server for them."
        error = ApiError(404, message, code="embeddings_not_supported")
    await _refuse(scope, send, error)


async def _refuse(scope: Scope, send: Send, error: ApiError) -> None:
    note_error(scope, error)
    await send_error(send, error, dialect_of(scope))
