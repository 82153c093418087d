"""Access checks: Host, Origin and key of every request are checked before any route sees it."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monotape.server.api_error import ApiError
from monotape.server.config import ServerConfig
from monotape.server.http.access_log import log_request, note_error
from monotape.server.http.dialect import dialect_of
from monotape.server.http.replies import send_body, send_error
from monotape.server.service.metrics import Metrics

OPEN_ROUTES = ("/health",)
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SINGLE = (b"host", b"origin")
#: A name or an address, an IPv6 one in brackets, and perhaps a port: RFC 9110, 7.2. Nothing before or after it.
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CORS_HEADERS = b"authorization, content-type, x-api-key, x-request-id, anthropic-version"
#: What a browser asks leave to send; the clients of OpenAI and Anthropic add headers about themselves.
_ASKED_HEADERS = re.compile(rb"[\w-]+( ?, ?[\w-]+)*", re.ASCII)
Headers = dict[bytes, bytes]


def request_id_for(headers: Headers) -> bytes:
    """The id that a client has given its request, or one that is made for it."""
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8).encode()


class Security:
    """Wraps the application. Everything is refused that is not explicitly open."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app, self._config, self._metrics, self._routes = app, config, metrics, routes
        self._key = None if config.api_key is None else config.api_key.encode()
        self._hosts = frozenset(name.lower() for name in (*_LOCAL_NAMES, config.host, *config.allowed_hosts))
        # Without a path, as browsers write them.
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers: Headers = dict(scope["headers"])
        request_id = request_id_for(headers)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id.decode()}
        origin = headers.get(b"origin")
        began, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id),
                    *self._cors(headers),
                ]
            await send(message)

        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS" and origin is not None:
                await send_body(answer, 204, b"", "text/plain")
            else:
                await self._app(scope, receive, answer)
        except ApiError as error:
            note_error(scope, error)
            await send_error(answer, error, dialect_of(scope))
        finally:
            path = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.requests.labels(path, str(status or 499)).inc()
            log_request(scope, status, time.monotonic() - began)

    def _check(self, scope: Scope, headers: Headers) -> None:
        names = [name for name, _ in scope["headers"]]
        for name in _SINGLE:  # of two, the one that is checked need not be the one that counts elsewhere
            if names.count(name) > 1:
                raise ApiError(400, f"The request has more than one {name.decode().title()} header.")
        self._check_host(headers)
        self._check_origin(headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._config.max_body_bytes:
            raise ApiError(
                413, f"The body is larger than {self._config.max_body_bytes} bytes.", code="request_too_large"
            )
        preflight = scope["method"] == "OPTIONS" and b"origin" in headers
        if self._key is not None and scope["path"] not in OPEN_ROUTES and not preflight:
            self._check_key(headers, scope["path"])

    def _check_host(self, headers: Headers) -> None:
        """A web page that points its own name at this machine (DNS rebinding) brings that name as Host.

        Where a key is needed such a page gains nothing, and proxies and names are anyone's choice.
        """
        if self._key is not None and not self._config.allowed_hosts:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        if (name := _host_name(host)) not in self._hosts:
            hint = (
                f"Start the server with --allowed-hosts {name} to allow it." if name else "It is not a name."
            )
            raise ApiError(
                403, f"The Host '{host[:200]}' is not allowed here. {hint}", code="host_not_allowed"
            )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get(b"origin")
        if origin is None or self._allows(origin) or _same_origin(origin, headers.get(b"host", b"")):
            return
        shown = origin.decode("latin-1")[:200]
        hint = f"Start the server with --allowed-origins {shown} to allow it."
        raise ApiError(403, f"The Origin '{shown}' is not allowed here. {hint}", code="origin_not_allowed")

    def _allows(self, origin: bytes) -> bool:
        return "*" in self._origins or origin.decode("latin-1").lower() in self._origins

    def _check_key(self, headers: Headers, path: str) -> None:
        assert self._key is not None
        candidates = [headers.get(b"x-api-key", b""), *_authorization(headers.get(b"authorization", b""))]
        # Every candidate is compared in full: how long it takes must not depend on the key.
        matches = [hmac.compare_digest(candidate, self._key) for candidate in candidates]
        if True not in matches:
            challenge = {"www-authenticate": 'Basic realm="monotape"'} if path == "/" else {}
            raise ApiError(
                401, "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key", headers=challenge,
            )  # fmt: skip

    def _cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        origin, asked = headers.get(b"origin"), headers.get(b"access-control-request-headers", b"")
        if origin is None or not self._allows(origin):
            return []
        named = asked if _ASKED_HEADERS.fullmatch(asked) else _CORS_HEADERS
        return [
            (b"access-control-allow-origin", origin), (b"vary", b"Origin"),
            (b"access-control-allow-headers", named),
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]  # fmt: skip


def _authorization(value: bytes) -> list[bytes]:
    """The key in an Authorization header: after Bearer, or the password that a browser asked its user for."""
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return [rest.strip()]
    if scheme.lower() == b"basic":
        try:
            return [base64.b64decode(rest.strip(), validate=True).partition(b":")[2]]
        except (binascii.Error, ValueError):
            return []
    return []


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; "" for what is none."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found["name"].strip("[]").lower()


def _same_origin(origin: bytes, host: bytes) -> bool:
    """Whether the page came from this server. An Origin has a scheme and a host, and nothing else."""
    scheme, _, place = origin.decode("latin-1").lower().partition("://")
    name = host.decode("latin-1").lower()
    return scheme in ("http", "https") and place == name and _host_name(name) != ""
