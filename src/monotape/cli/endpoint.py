"""A small client for any server that speaks OpenAI's chat API: what `chat --url` and `bench serve` talk through.

Standard library only, and one timestamp for each piece that the network hands over: a measuring client must not be
what it measures.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from monotape import __version__
from monotape.errors import RequestError, UsageError

READ_SIZE = 1 << 16
DEADLINE_S = 600.0  # a server may say nothing while it reads a long prompt


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that a server offers."""

    id: str
    context: int | None  # None: the server does not say


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a streamed answer, and when it was here."""

    time_s: float  # time.perf_counter
    text: str
    reasoning: str = ""
    tokens: int | None = None  # how many tokens the server says are in it
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, Any] | None = None  # what the engine measured, in vLLM's and llama.cpp's words


class Endpoint:
    """A server at an address, with or without /v1 at its end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(
                f"'{url}' is not the address of a server.", "Write it like http://127.0.0.1:8000."
            )
        try:
            parts.port  # noqa: B018 (reading it is the check)
        except ValueError:
            raise UsageError(f"'{url}' has no port that can be.", "Ports go from 1 to 65535.") from None
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{path}"
        self._parts, self._path, self._key = parts, path, api_key

    def models(self) -> list[RemoteModel]:
        found = self._json("GET", "/v1/models").get("data")
        if not isinstance(found, list) or not found:
            raise RequestError(f"{self.url} offers no model.", "See what /v1/models answers.")
        return [RemoteModel(str(entry["id"]), _context_of(entry)) for entry in found]

    def model(self, name: str | None) -> RemoteModel:
        """The model of that name, or the first one."""
        offered = self.models()
        if name is None:
            return offered[0]
        for model in offered:
            if model.id == name:
                return model
        names = ", ".join(model.id for model in offered)
        raise UsageError(f"{self.url} has no model '{name}'.", f"It offers: {names}.")

    def stream_chat(self, body: Mapping[str, Any]) -> ChatStream:
        """Sends a chat and gives its answer as it comes."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        connection, response = self._send("POST", "/v1/chat/completions", asked)
        return ChatStream(self.url, connection, response, started)

    def _json(self, method: str, path: str) -> dict[str, Any]:
        connection, response = self._send(method, path, None)
        with connection:
            found = _object(response)
        if found is None:
            raise RequestError(
                f"{self.url}{path} does not answer with a JSON object.", "Is it an OpenAI server?"
            )
        return found

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        connection = _connect(self._parts.scheme, self._parts.hostname or "", self._parts.port)
        headers = {"Accept": "application/json", "User-Agent": f"monotape/{__version__}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode() if body is not None else None
        try:
            connection.inner.request(method, self._path + path, data, headers)
            response = connection.inner.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UsageError(
                f"No server answers at {self.url} ({reason}).",
                "Start one with `monotape serve MODEL`, or give another --url.",
            ) from None
        if response.status != 200:
            with connection:
                raise _refusal(self.url, response)
        return connection, response


class ChatStream:
    """An answer as it comes. Closing it ends the connection, which tells the server to stop."""

    def __init__(
        self, url: str, connection: _Connection, response: http.client.HTTPResponse, started_s: float
    ) -> None:
        self.started_s = started_s  # just before the request was sent
        self.chunks: list[Chunk] = []
        self._url, self._connection, self._response = url, connection, response
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def usage(self) -> Mapping[str, Any]:
        return next((chunk.usage for chunk in reversed(self.chunks) if chunk.usage), {})

    @property
    def timings(self) -> Mapping[str, Any]:
        return next((chunk.timings for chunk in reversed(self.chunks) if chunk.timings), {})

    def close(self) -> None:
        self._connection.close()

    def __iter__(self) -> Iterator[Chunk]:
        with self._connection:
            for time_s, data in self._events():
                if data == "[DONE]":
                    return
                chunk = self._chunk(time_s, data)
                self._text.append(chunk.text)
                self.chunks.append(chunk)
                yield chunk

    def _events(self) -> Iterator[tuple[float, str]]:
        """The data of each event, with the moment at which its last byte was read."""
        buffer = b""
        while True:
            try:
                piece = self._response.read1(READ_SIZE)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise RequestError(
                    f"{self._url} broke off in the middle of an answer.",
                    str(error) or "See the server's log.",
                ) from None
            time_s = time.perf_counter()
            if not piece:
                return
            buffer += piece
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield time_s, line[5:].decode("utf-8", "replace").strip()

    def _chunk(self, time_s: float, data: str) -> Chunk:
        try:
            found = json.loads(data)
        except ValueError:
            raise RequestError(f"{self._url} sent an event that is not JSON: {data[:80]}") from None
        if isinstance(error := found.get("error"), dict):
            raise RequestError(f"{self._url} ended the answer: {error.get('message', 'no reason given')}")
        choices: Sequence[Any] = found.get("choices") or ()
        choice = choices[0] if choices else {}
        delta = choice.get("delta") or {}
        return Chunk(
            time_s,
            delta.get("content") or "",
            delta.get("reasoning_content") or delta.get("reasoning") or "",
            _token_count(found, choice),
            choice.get("finish_reason"),
            found.get("usage"),
            {**(found.get("timings") or {}), **(found.get("metrics") or {})} or None,
        )


class _Connection:
    """A connection that closes at the end of a with block, whatever happens in it."""

    def __init__(self, inner: http.client.HTTPConnection) -> None:
        self.inner = inner

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.inner.close()


def _connect(scheme: str, host: str, port: int | None) -> _Connection:
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    return _Connection(kind(host, port, timeout=DEADLINE_S))


def _token_count(found: Mapping[str, Any], choice: Mapping[str, Any]) -> int | None:
    """Tokens in an event, where the server sends their ids along."""
    ids = choice.get("token_ids") or found.get("token_ids")
    return len(ids) if isinstance(ids, list) else None


def _context_of(entry: Mapping[str, Any]) -> int | None:
    """vLLM and Monotape say max_model_len; llama.cpp says meta.n_ctx."""
    meta = entry.get("meta")
    context = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    return context if isinstance(context, int) else None


def _object(response: http.client.HTTPResponse) -> dict[str, Any] | None:
    """The JSON object that a server answered with; None where it is none, or did not come."""
    try:
        found = json.loads(response.read())
    except (ValueError, OSError, http.client.HTTPException):
        return None
    return found if isinstance(found, dict) else None


def _refusal(url: str, response: http.client.HTTPResponse) -> RequestError:
    """What a server said when it did not answer, in its own words where it has some."""
    error = (_object(response) or {}).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    wait = response.getheader("Retry-After")
    hints = {
        401: "Give the server's key with --api-key.",
        404: "Is this the address of an OpenAI server, and is the model one of its own?",
        429: f"Others are using it. Try again in {wait} s." if wait else "Others are using it. Try again.",
        503: "The server is loading its model, or its engine is being restarted. Try again.",
    }
    return RequestError(
        f"{url} answered {response.status}: {message or response.reason}".rstrip(".") + ".",
        hints.get(response.status, "See the server's log."),
    )
