"""Whatever ends a request before its answer is complete, as its client sees it."""

from __future__ import annotations

import logging

from monotape.errors import RequestError
from monotape.server.api_error import ApiError, from_engine_error, too_deep
from monotape.server.engine.client import EngineFault

LOG = logging.getLogger("monotape.server")


def as_api_error(error: Exception, what: str) -> ApiError:
    """The error to send. A mistake of our own goes to the log, which says what failed and where."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return from_engine_error(error)
    if isinstance(error, EngineFault):
        return _from_fault(error)
    if isinstance(error, RecursionError):  # only over what a client has nested is anything recursive
        LOG.warning("%s was nested too deeply.", what, exc_info=error)
        return too_deep()
    LOG.error("%s failed.", what, exc_info=error)
    return ApiError(500, "The server made a mistake; its log says which.", code="internal_error")


def _from_fault(error: EngineFault) -> ApiError:
    """A completion that the engine could not finish."""
    if error.kind == "request":
        return ApiError(400, error.message, code="invalid_value")
    if error.kind == "internal":
        return ApiError(500, "The server made a mistake; its log says which.", code="internal_error")
    if error.kind == "model":
        return ApiError(500, error.message, code="model_fault")
    if error.kind == "memory":
        return ApiError(503, error.message, code="insufficient_memory")
    return ApiError(503, error.message, code="engine_unavailable", headers={"retry-after": "1"})
