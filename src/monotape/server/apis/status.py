"""The small routes: tokens, health, metrics, version and what the playground wants to know."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from monotape import __version__
from monotape.errors import RequestError
from monotape.server.api_error import ApiError, bad_request, from_engine_error
from monotape.server.conversation.prepare import checked_message, joined_system
from monotape.server.engine.info import info_object
from monotape.server.http.endpoint import Plain
from monotape.server.requests.openai import DetokenizeRequest, TokenizeRequest
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
    """The version of Monotape."""
    return {"version": __version__}


async def metrics(service: Service, _: None, scope: Scope) -> Plain:
    """Counters and histograms for Prometheus."""
    """Figures for Prometheus, under vLLM's names where it has one."""
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
    """The token ids of a prompt, or of a conversation as the model sees it."""
    text, found = service.require_ready()
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt", "invalid_value")
    prompt, special = request.prompt or "", request.add_special_tokens
    if request.messages is not None:
        try:
            prompt, _ = await text.render(
                joined_system(
                    [checked_message(message, index) for index, message in enumerate(request.messages)]
                ),
                add_generation_prompt=request.add_generation_prompt,
                variables=request.chat_template_kwargs,
            )
        except RequestError as error:
            raise bad_request(f"{error.message} {error.hint}", "messages", "invalid_value") from None
        special = False  # the template writes what the model wants
    try:
        ids, _ = await text.encode(prompt, add_special=special, context=service.config.max_body_bytes)
    except RequestError as error:
        raise from_engine_error(error) from None
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": found.context, "tokens": ids}
    if request.return_token_strs and text.tokenizer is not None:
        answer["token_strs"] = [text.tokenizer.token_text(token_id) for token_id in ids]
    return answer


async def tokenizer_info(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """The tokens that have names, and the chat template: what lm-eval's remote tokenizer asks for."""
    text = service.require_ready()[0]
    named = {} if text.tokenizer is None else text.tokenizer.named_tokens
    return {**named, "chat_template": text.template}


async def detokenize(service: Service, request: DetokenizeRequest, scope: Scope) -> dict[str, Any]:
    """The text of tokens."""
    """The text of token ids."""
    text, found = service.require_ready()
    service.check_model(request.model)
    for token_id in request.tokens:
        if token_id >= found.vocab:
            raise ApiError(
                400, f"Token id {token_id} is not in the vocabulary, which has {found.vocab} tokens.",
                code="invalid_value", param="tokens",
            )  # fmt: skip
    return {"prompt": await text.decode(request.tokens)}
