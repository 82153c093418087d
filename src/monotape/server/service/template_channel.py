"""Renders chat templates from an event loop: no thread waits for the process that does it (template_process.py)."""

from __future__ import annotations

import asyncio
import collections
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from monotape.engine.template_memory import Question, TemplateMemory, packed
from monotape.engine.template_process import AT_ONCE, TemplateLimits, end, started, text_of, whole
from monotape.errors import RequestError


class TemplateChannel:
    """One child process, asked one question at a time, in order; started again after it was killed or has died.

    A question is answered even if its client has left: the next one must not read that answer.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._questions: collections.deque[tuple[Question, asyncio.Future[str]]] = collections.deque()
        self._child: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._memory = TemplateMemory()
        self._loop: asyncio.AbstractEventLoop | None = None  # while it watches the socket
        self._deadline: asyncio.TimerHandle | None = None
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def start(self) -> None:
        """Starts the process, so that the first request need not wait for it. Any thread may do that, once."""
        if self._child is None:
            self._child, self._memory = started(self._limits), TemplateMemory()

    def close(self) -> None:
        self._stop_watching()
        if self._child is not None:
            end(*self._child)
            self._child = None

    async def render(self, template: str, context: Mapping[str, Any]) -> str:
        """The rendered template; a RequestError when it fails or goes beyond its limits."""
        self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = self._loop.create_future()
        self._questions.append((packed(template, context), answer))
        if len(self._questions) == 1:
            self._ask()
        return await answer

    def _ask(self) -> None:
        """Sends the first question. One for which no process can be started fails, and the next has its try."""
        while self._questions:
            try:
                return self._begin()
            except OSError as error:
                _, waiting = self._questions.popleft()
                if not waiting.done():
                    waiting.set_exception(error)

    def _begin(self) -> None:
        assert self._loop is not None
        if self._child is not None and self._child[0].poll() is not None:
            self.close()
        self.start()
        assert self._child is not None
        process, connection = self._child
        connection.setblocking(False)
        self._received.clear()
        self._unsent = memoryview(self._memory.request(self._questions[0][0]))
        self._deadline = self._loop.call_later(self._limits.seconds, process.kill)
        self._loop.add_reader(connection, self._receive)
        self._send()

    def _send(self) -> None:
        assert self._child is not None and self._loop is not None
        _, connection = self._child
        try:
            self._unsent = self._unsent[connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it has died, which its end of the connection tells too
            self._unsent = memoryview(b"")
        if self._unsent:
            self._loop.add_writer(connection, self._send)
        else:
            self._loop.remove_writer(connection)

    def _receive(self) -> None:
        assert self._child is not None
        try:
            part = self._child[1].recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._received += part
        answer = whole(self._received)
        if answer is None and part:
            return
        if answer is None:
            self.close()
        elif self._deadline is not None:
            self._deadline.cancel()
        self._give(answer)
        self._ask()

    def _give(self, answer: bytes | None) -> None:
        """To the client, if it is still there. The next answer may begin like this one in any case."""
        _, waiting = self._questions.popleft()
        try:
            text = text_of(answer, self._limits, self._memory)
        except RequestError as error:
            if not waiting.done():
                waiting.set_exception(error)
        else:
            if not waiting.done():
                waiting.set_result(text)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._child is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._child[1])
            self._loop.remove_writer(self._child[1])
