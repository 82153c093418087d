"""The engine's end of the process that renders chat templates: starts it, asks it, kills it in time."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from monotape.engine.spawn import spawn
from monotape.errors import RequestError

_HINT = "Give another template with chat_template, or use generate() with a plain prompt."


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What a template may use. Real ones take a thousandth of each."""

    seconds: float = 10.0
    fuel: int = 20_000_000  # steps of the template engine
    max_characters: int = 16 * 2**20
    max_bytes: int = 2**30


class TemplateProcess:
    """One child process, started when first needed and again after it was killed. Safe from any thread."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Starts the process if it does not run, so that the first request need not wait for it."""
        with self._lock:
            self._running()

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """The rendered template; a RequestError when it fails or goes beyond its limits."""
        try:
            request = json.dumps({"template": template, "context": context}, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"The conversation cannot be written as JSON: {error}.",
                "Use strings, numbers, lists and dictionaries only.",
            ) from None
        with self._lock:
            reply = self._exchange(request)
        if reply is None:
            raise RequestError(
                f"The chat template went beyond its limits ({self._limits.seconds:g} s, "
                f"{self._limits.max_bytes >> 20} MiB) and was stopped.",
                _HINT,
            )
        if "text" in reply:
            return str(reply["text"])
        raise _error(reply["kind"], reply["error"], self._limits)

    def close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            if self._finalizer is not None:
                self._finalizer()
            limits = self._limits
            self._process = spawn(
                Path(__file__).with_name("template_child.py"),
                str(limits.fuel), str(limits.max_characters), str(limits.max_bytes), str(limits.seconds),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _exchange(self, request: bytes) -> dict[str, Any] | None:
        """The child's answer, or None when it was killed or died."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(self._limits.seconds, process.kill)
        deadline.start()
        try:
            process.stdin.write(struct.pack(">I", len(request)) + request)
            process.stdin.flush()
            header = _exactly(process.stdout, 4)
            body = _exactly(process.stdout, struct.unpack(">I", header)[0]) if header else b""
        except BrokenPipeError:
            body = b""
        except BaseException:  # an interrupt: the answer of this request must not be read by the next
            process.kill()
            raise
        finally:
            deadline.cancel()
        if not body:
            process.kill()
            process.wait()
            return None
        answer: dict[str, Any] = {"text": body[1:].decode()} if body[:1] == b"T" else json.loads(body[1:])
        return answer


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    return data if len(data) == count else b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # what was still to be written does not matter
                stream.close()


def _error(kind: str, message: str, limits: TemplateLimits) -> RequestError:
    if kind == "raised":
        reason = message.rstrip(" .")
        return RequestError(f"The chat template refuses this conversation: {reason}.", "Change the messages.")
    if kind == "fuel":
        return RequestError(f"The chat template did not end within {limits.fuel} steps.", _HINT)
    if kind == "size":
        return RequestError(
            f"The chat template wrote {message}; at most {limits.max_characters} are allowed.", _HINT
        )
    return RequestError(f"The chat template failed: {message}.", _HINT)
