"""Every route in one table."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Scope

from monotape.server.apis import status
from monotape.server.apis.chat import chat_completions
from monotape.server.apis.completions import completions
from monotape.server.apis.messages import count_tokens, messages
from monotape.server.apis.models import model, models
from monotape.server.apis.openapi import document
from monotape.server.apis.responses import responses
from monotape.server.http.endpoint import Handler, Route
from monotape.server.requests.anthropic import CountTokensRequest, MessagesRequest
from monotape.server.requests.fields import Unserved
from monotape.server.requests.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from monotape.server.requests.responses import ResponsesRequest
from monotape.server.service.service import Service

#: The bodies of the routes that answer with text.
ANSWERED = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)


def _answered(path: str, handler: Handler, body: type[msgspec.Struct]) -> Route:
    """A route that answers with text; it refuses the fields that it does not serve and that change an answer."""
    unserved = Unserved(body, path, ANSWERED)
    return Route("POST", path, handler, body, unserved.check, unserved.wide)


async def openapi(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """This document."""
    return document(ROUTES)


ROUTES: tuple[Route, ...] = (
    _answered("/v1/chat/completions", chat_completions, ChatRequest),
    _answered("/v1/completions", completions, CompletionRequest),
    _answered("/v1/responses", responses, ResponsesRequest),
    _answered("/v1/messages", messages, MessagesRequest),
    Route("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest),
    Route("GET", "/v1/models", models),
    Route("GET", "/v1/models/{model:path}", model),
    Route("POST", "/tokenize", status.tokenize, TokenizeRequest),
    Route("POST", "/detokenize", status.detokenize, DetokenizeRequest),
    Route("GET", "/tokenizer_info", status.tokenizer_info),
    Route("GET", "/health", status.health),
    Route("GET", "/metrics", status.metrics),
    Route("GET", "/version", status.version),
    Route("GET", "/monotape/info", status.info),
    Route("GET", "/", status.page),
    Route("GET", "/openapi.json", openapi),
)
