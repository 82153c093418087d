"""GET /v1/models and /v1/models/{model}: the names under which the model is served, in the client's own shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Scope

from monotape.server.api_error import bad_request
from monotape.server.http.dialect import dialect_of
from monotape.server.service.service import Service

_MOST = 1000  # entries of a page


async def models(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """Every name of the model that is served."""
    if dialect_of(scope) == "openai":
        return {"object": "list", "data": [_openai(service, name) for name in service.names]}
    names, more = _page(service.names, parse_qs(scope["query_string"].decode("latin-1")))
    return {
        "data": [_anthropic(service, name) for name in names],
        "has_more": more,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


async def model(service: Service, _: None, scope: Scope) -> dict[str, Any]:
    """One name of the model, with its context."""
    name = service.check_model(scope["path_params"]["model"])
    return _openai(service, name) if dialect_of(scope) == "openai" else _anthropic(service, name)


def _context(service: Service) -> int | None:
    return None if service.engine.info is None else service.engine.info.context


def _openai(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "monotape",
        "root": service.names[0], "max_model_len": _context(service),
    }  # fmt: skip


def _anthropic(service: Service, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    context = _context(service)
    return {
        "type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active",
        "max_input_tokens": context, "max_tokens": context,
    }  # fmt: skip


def _page(names: tuple[str, ...], query: dict[str, list[str]]) -> tuple[tuple[str, ...], bool]:
    """The names that a client asks for with after_id, before_id and limit, and whether there are more that way."""
    limit = query.get("limit", ["20"])[-1]
    if not (limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
        raise bad_request(f"limit is '{limit[:60]}'. It must be from 1 to {_MOST}.", "limit", "invalid_value")
    count = int(limit[:9])
    if "before_id" in query:
        before = query["before_id"][-1]
        left = names[: names.index(before)] if before in names else ()
        return left[-count:], len(left) > count
    after = query.get("after_id", [None])[-1]
    left = names if after is None else names[names.index(after) + 1 :] if after in names else ()
    return left[:count], len(left) > count
