"""What one connection may use before its key is known, and how many there may be."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

from monotape.server.api_error import ApiError

_OTHER_FILES = 128  # that the server has open beside its connections


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times of a connection. Real clients stay far below all of them."""

    connections: int = 512
    head_bytes: int = 32 << 10  # request line and headers, and what a chunked body has around its data
    head_fields: int = 128
    pipelined: int = 16  # requests that may come before the answer to the first
    head_s: float = 20.0  # from a connection, or the first byte of a request, to the end of its headers
    body_s: float = 60.0  # from the end of the headers to the end of the body
    linger_s: float = 5.0  # for a body that goes on after its answer, which may be a refusal
    idle_s: float = 75.0  # between an answer and the next request
    stall_s: float = 60.0  # for a client that does not read its answer

    def headers_too_large(self) -> ApiError:
        message = f"The headers are larger than {self.head_bytes} bytes or more than {self.head_fields}."
        return ApiError(431, message, code="headers_too_large")


def allow_open_files(limits: Limits) -> None:
    """Asks for as many open files as the connections may take; macOS gives a process 256 unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may refuse; then fewer connections fit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
