"""The small routes: tokens, health, metrics, version and what the playground wants to know."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from monotape import __version__
from monotape.backends.token_ids import TokenIds
from monotape.server.api_error import bad_request
from monotape.server.conversation.conversation import prompt_of
from monotape.server.engine.info import info_object
from monotape.server.http.endpoint import Plain
from monotape.server.requests.openai import ChatRequest, DetokenizeRequest, TokenizeRequest
from monotape.server.service.metrics import CONTENT_TYPE
from monotape.server.service.service import Service

#: The page needs nothing from elsewhere, and may load nothing from there.
PAGE_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def health(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """200 once the model has made a token, 503 before that and while the engine is gone."""
    service.require_ready()
    return {"status": "ok"}


async def version(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """The version of Monotape."""
    return {"version": __version__}


async def metrics(service: Service, _: None, scope: Scope) -> Plain:
    """Counters and histograms for Prometheus."""
    return Plain(service.metrics.text(), CONTENT_TYPE)


async def info(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """What the playground shows about the model and the machine; info.py documents the shape."""
    found = service.require_ready()[1]
    return info_object(service.names[0], found, __version__, service.engine.startup, service.engine.defaults)


async def page(service: Service, _: None, scope: Scope) -> Plain:
    """The playground."""
    from monotape.server.playground import page as playground

    headers = ((b"content-security-policy", PAGE_POLICY), (b"x-content-type-options", b"nosniff"))
    return Plain(playground().encode(), "text/html; charset=utf-8", headers)


async def tokenize(service: Service, request: TokenizeRequest, scope: Scope) -> dict[str, Any]:
    """The tokens of a text, or of a conversation as the template writes it."""
    text, found = service.require_ready()
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt", "invalid_value")
    if request.messages is not None:
        ids = (await prompt_of(service, _as_chat(request))).ids
    else:
        ids, _ = await text.encode(
            request.prompt or "",
            add_special=request.add_special_tokens,
            context=service.config.max_body_bytes,
        )
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": found.context, "tokens": list(ids)}
    if request.return_token_strs and text.tokenizer is not None:
        answer["token_strs"] = [text.tokenizer.token_text(token_id) for token_id in ids]
    return answer


def _as_chat(request: TokenizeRequest) -> ChatRequest:
    return ChatRequest(
        messages=request.messages or [],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        chat_template_kwargs=request.chat_template_kwargs,
    )


async def tokenizer_info(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """The tokens that have names, and the chat template: what lm-eval's remote tokenizer asks for."""
    text = service.require_ready()[0]
    named = {} if text.tokenizer is None else text.tokenizer.named_tokens
    return {**named, "chat_template": text.template}


async def detokenize(service: Service, request: DetokenizeRequest, scope: Scope) -> dict[str, Any]:
    """The text of tokens."""
    text, _ = service.require_ready()
    service.check_model(request.model)
    service.check_ids(TokenIds.of(request.tokens), "tokens")
    return {"prompt": await text.decode(request.tokens)}
