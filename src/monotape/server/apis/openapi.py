"""The OpenAPI document, made from the routes and the types that check their bodies."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from monotape import __version__
from monotape.server.http.endpoint import Route

_ERRORS = {
    "400": "The request is not valid, or asks for what is not supported.", "401": "The key is missing or wrong.",
    "403": "The Host or the Origin is not allowed.", "404": "There is no such model.",
    "408": "The request did not arrive in time.", "413": "The body is too large.",
    "429": "Too many requests are waiting; see Retry-After.",
    "431": "The headers are too large.",
    "500": "The model failed.", "503": "The engine is loading or being restarted.",
}  # fmt: skip
_TEXT_ANSWERS = {"/metrics": "text/plain", "/": "text/html"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    listed = list(routes)
    bodies = [route.body for route in listed if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in listed:
        paths.setdefault(route.path.replace(":path", ""), {})[route.method.lower()] = _operation(
            route, None if route.body is None else schema_of[route.body]
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Monotape",
            "version": __version__,
            "description": "One model behind OpenAI's and Anthropic's interfaces. Fields that change the answer "
            "and are not served are refused; names that nobody documents are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _operation(route: Route, schema: Any) -> dict[str, Any]:
    name = getattr(route.handler, "__name__", "route")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": (route.handler.__doc__ or name).strip().split("\n")[0],
        "responses": {"200": {"description": "The answer.", "content": _content(route)}, **_failures()},
    }
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{" in route.path:
        parameter = {
            "name": "model",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        operation["parameters"] = [parameter]
    return operation


def _content(route: Route) -> dict[str, Any]:
    if route.path in _TEXT_ANSWERS:
        return {_TEXT_ANSWERS[route.path]: {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if route.body is not None and "stream" in route.body.__struct_fields__:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


@functools.cache
def _failures() -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": schema} for status, text in _ERRORS.items()}
