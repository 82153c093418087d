"""The engine's end of the process that renders chat templates: starts it, asks it, kills it in time."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monotape.engine.spawn import spawn
from monotape.engine.template_memory import Question, TemplateMemory, packed
from monotape.errors import RequestError

_SIZE = struct.Struct(">I")  # before each message
AT_ONCE = 1 << 18  # bytes that are received at once: more than a socket holds
WITHOUT_TEMPLATE = "send a plain prompt, by generate(), `monotape run --raw` or /v1/completions"
_HINT = f"Give another template with chat_template, or {WITHOUT_TEMPLATE}."


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
        self._connection: socket.socket | None = None  # its standard input and output
        self._memory = TemplateMemory()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Starts the process if it does not run, so that the first request need not wait for it."""
        with self._lock:
            self._running()

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """The rendered template; a RequestError when it fails or goes beyond its limits."""
        question = packed(template, context)
        with self._lock:
            return text_of(self._exchange(question), self._limits, self._memory)

    def close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._process = self._connection = None

    def _running(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._process is None or self._connection is None or self._process.poll() is not None:
            if self._finalizer is not None:
                self._finalizer()
            self._process, self._connection = started(self._limits)
            self._memory = TemplateMemory()
            self._finalizer = weakref.finalize(self, end, self._process, self._connection)
        return self._process, self._connection

    def _exchange(self, question: Question) -> bytes | None:
        """The child's answer, or None when it was killed or died."""
        process, connection = self._running()
        request = self._memory.request(question)
        deadline, received = time.monotonic() + self._limits.seconds, bytearray()
        try:
            connection.settimeout(self._limits.seconds)
            connection.sendall(request)
            while (answer := whole(received)) is None:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                part = connection.recv(AT_ONCE)
                if not part:
                    break
                received += part
        except (ConnectionError, TimeoutError):
            answer = None
        except BaseException:  # an interrupt: the answer of this request must not be read by the next
            process.kill()
            raise
        if answer is None:
            process.kill()
            process.wait()
        return answer


def started(limits: TemplateLimits) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A child, and the socket that is its standard input and output."""
    here, there = socket.socketpair()
    with there:
        process = spawn(
            Path(__file__).with_name("template_child.py"),
            str(limits.fuel), str(limits.max_characters), str(limits.max_bytes), str(limits.seconds),
            stdin=there, stdout=there, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return process, here


def end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()


def whole(received: bytearray) -> bytes | None:
    """The child's answer without its size; None as long as some of it is missing."""
    if len(received) < _SIZE.size:
        return None
    end_of_it = _SIZE.size + _SIZE.unpack_from(received)[0]
    return None if len(received) < end_of_it else bytes(received[_SIZE.size : end_of_it])


def text_of(answer: bytes | None, limits: TemplateLimits, memory: TemplateMemory) -> str:
    """The text that a child answered with; a RequestError for an error, and for None: it was stopped."""
    if answer is None:
        raise RequestError(
            f"The chat template went beyond its limits ({limits.seconds:g} s, {limits.max_bytes >> 20} MiB) "
            "and was stopped.",
            _HINT,
        )
    if answer[:1] == b"T":
        return memory.text(answer[1:])
    reply = json.loads(answer[1:])
    raise _error(reply["kind"], reply["error"], limits)


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
