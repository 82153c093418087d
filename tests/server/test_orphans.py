"""A server that is killed leaves no process behind, whatever its children were doing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from monotape.server.engine import process as engine_process
from processes import alive, descendants, need_proc, wait_for_end
from server.running import RunningServer, scripted_server
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def doomed(**settings: Any) -> Iterator[tuple[RunningServer, list[int]]]:
    """A server and its children, which the test kills."""
    need_proc()
    with scripted_server(**settings) as server:
        pids: list[int] = []
        try:
            yield server, pids
        finally:
            for pid in filter(alive, pids):  # so that a failed test leaves nothing behind
                os.kill(pid, signal.SIGKILL)


def kill(server: RunningServer, pids: list[int], *wanted: str) -> None:
    """Kills the server when all wanted processes are there; then none of them may stay."""
    found = descendants(server.process.pid)
    while not all(any(name in command for command in found.values()) for name in wanted):
        assert server.process.poll() is None
        found = descendants(server.process.pid)
    pids += found
    # Stopped, it no longer reads: what its engine sends meanwhile makes the kernel reset their connection at the end,
    # which the engine does not see as the end of a file.
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    server.process.kill()
    server.process.wait()
    wait_for_end(*pids)


def test_killed_in_the_middle_of_a_stream() -> None:
    with doomed() as (server, pids):
        body = {"messages": [{"role": "user", "content": "rate=50 repeat=9000 say:word "}], "stream": True}
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", server.wait().url + CHAT, json=body, timeout=PATIENCE_S) as stream,
        ):
            lines = stream.iter_lines()
            while '"content":"w' not in next(lines):
                pass
            kill(server, pids, "server.engine.process", "template_child", "server.grammar.process")


def test_killed_while_the_model_loads(tmp_path: Path) -> None:
    gate = tmp_path / "closed"
    gate.touch()
    with doomed(engine={"model": str(gate)}) as (server, pids):
        assert server.get("/health").status_code == 503
        kill(server, pids, "server.engine.process", "template_child")


def test_killed_with_an_engine_that_hangs() -> None:
    with doomed() as (server, pids):
        body = {"messages": [{"role": "user", "content": "hang say:abcdef"}], "stream": True}
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", server.wait().url + CHAT, json=body, timeout=PATIENCE_S) as stream,
        ):
            next(stream.iter_lines())
            kill(server, pids, "server.engine.process", "template_child", "server.grammar.process")


def test_killed_while_a_grammar_is_followed() -> None:
    """The process that follows it was forked, and a fork does not inherit what its parent asked of the kernel."""
    with doomed() as (server, pids):
        question = "rate=20 say:" + "a" * 900
        body = {
            "messages": [{"role": "user", "content": question}],
            "stream": True,
            "guided_regex": "a{1,900}",
        }
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", server.wait().url + CHAT, json=body, timeout=PATIENCE_S) as stream,
        ):
            lines = stream.iter_lines()
            while '"content":"a' not in next(lines):
                pass
            kill(server, pids, "server.engine.process", "template_child", "server.grammar.process")
            assert len(pids) >= 4  # with the fork


@pytest.mark.parametrize("what", ["reset", "half a header", "half a message", "end"])
def test_the_engine_ends_however_its_connection_does(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """On a system where the kernel does not do it."""

    class Ended(BaseException):
        pass

    class Connection:
        def __init__(self) -> None:
            self.parts = {"half a header": [b"\0\0"], "half a message": [b"\0\0\0\x09", b"x"]}.get(what, [])

        def read(self, size: int) -> bytes:
            if what == "reset":
                raise ConnectionResetError
            return self.parts.pop(0) if self.parts else b""

    def leave(code: int) -> None:
        raise Ended

    monkeypatch.setattr(engine_process.os, "_exit", leave)
    engine: Any = engine_process.EngineProcess(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(Ended):
        engine.read(Connection())
