"""The application: every route in one table, behind the checks of security.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from monotape.server.api_error import ApiError
from monotape.server.apis import status
from monotape.server.apis.chat import chat_completions
from monotape.server.apis.completions import completions
from monotape.server.apis.messages import count_tokens, messages
from monotape.server.apis.models import model, models
from monotape.server.apis.openapi import document
from monotape.server.apis.responses import responses
from monotape.server.http.access_log import note_error
from monotape.server.http.dialect import dialect_of
from monotape.server.http.endpoint import Endpoint, Handler, send_error
from monotape.server.http.security import Security
from monotape.server.requests.anthropic import CountTokensRequest, MessagesRequest
from monotape.server.requests.fields import Unserved
from monotape.server.requests.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from monotape.server.requests.responses import ResponsesRequest
from monotape.server.service.service import Service


@dataclass(frozen=True, slots=True)
class Entry:
    """One route."""

    method: str
    path: str
    handler: Handler
    body: type | None = None


#: The bodies of the routes that answer with text.
ANSWERED = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
ROUTES: tuple[Entry, ...] = (
    Entry("POST", "/v1/chat/completions", chat_completions, ChatRequest),
    Entry("POST", "/v1/completions", completions, CompletionRequest),
    Entry("POST", "/v1/responses", responses, ResponsesRequest),
    Entry("POST", "/v1/messages", messages, MessagesRequest),
    Entry("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest),
    Entry("GET", "/v1/models", models),
    Entry("GET", "/v1/models/{model:path}", model),
    Entry("POST", "/tokenize", status.tokenize, TokenizeRequest),
    Entry("POST", "/detokenize", status.detokenize, DetokenizeRequest),
    Entry("GET", "/tokenizer_info", status.tokenizer_info),
    Entry("GET", "/health", status.health),
    Entry("GET", "/metrics", status.metrics),
    Entry("GET", "/version", status.version),
    Entry("GET", "/monotape/info", status.info),
    Entry("GET", "/", status.page),
)


async def openapi(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """This document."""
    return document(ROUTES)


ROUTES = (*ROUTES, Entry("GET", "/openapi.json", openapi))


def unserved(entry: Entry) -> Unserved | None:
    """What a route that answers with text refuses."""
    return Unserved(entry.body, entry.path, ANSWERED) if entry.body in ANSWERED else None


def build(service: Service) -> ASGIApp:
    """The whole server as one ASGI application."""
    routes = [
        Route(
            entry.path,
            Endpoint(service, entry.handler, entry.body, unserved(entry)),
            methods=[entry.method],
        )
        for entry in ROUTES
    ]
    allowed = _methods()
    inner = Router(routes, redirect_slashes=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        methods = allowed.get(scope["path"])
        if scope["type"] == "http" and methods is not None and scope["method"] not in methods:
            message = (
                f"{scope['path']} does not take {scope['method']}. It takes {', '.join(sorted(methods))}."
            )
            error = ApiError(
                405, message, code="method_not_allowed", headers={"allow": ", ".join(sorted(methods))}
            )
            note_error(scope, error)
            return await send_error(send, error, dialect_of(scope))
        await inner(scope, receive, send)

    inner.default = _not_found
    return Security(app, service.config, service.metrics, frozenset(entry.path for entry in ROUTES))


def _methods() -> dict[str, set[str]]:
    methods: dict[str, set[str]] = {}
    for entry in ROUTES:
        methods.setdefault(entry.path, set()).add(entry.method)
        if entry.method == "GET":
            methods[entry.path].add("HEAD")
    return methods


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what is there instead, for routes that applications expect of a server like this one."""
    error = ApiError(404, f"There is no route {scope['method']} {scope['path'][:200]}.", code="not_found")
    if scope["path"].rpartition("/")[2] in ("embeddings", "embed"):
        message = "This engine does not make embeddings; it answers with text. Use another server for them."
        error = ApiError(404, message, code="embeddings_not_supported")
    note_error(scope, error)
    await send_error(send, error, dialect_of(scope))
