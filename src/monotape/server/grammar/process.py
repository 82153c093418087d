"""The process that follows grammars: it prepares the vocabulary once and forks for every grammar.

A grammar comes from a client, and llguidance works at it for as long as it takes, in as much memory as it takes, with
panics that are sometimes aborts. So each has a process of its own, with limits, that holds nothing else. Forked
processes share the vocabulary, which takes seconds to prepare; to kill one costs nothing.

Started by `spawn` with FD as its argument. On the socket FD come two lines of JSON, where the tokenizer
is and then the size of the model's table; after that orders of five bytes: b"F" with the socket of a grammar, b"K"
with the id of a process to kill, or b"E" with the id of one that has ended and a socket on which to say of which
signal. It ends when the other end does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from monotape.engine.child import end_with_parent
from monotape.engine.config import EngineConfig
from monotape.errors import RequestError
from monotape.server.grammar import wire
from monotape.server.grammar.definition import Grammar
from monotape.server.grammar.matcher import Matcher, prepared

_REAP_S = 1.0
_REMEMBERED = 256  # deaths that the engine may ask about


class _Budget:
    """CPU seconds that this process may still use; the kernel ends it when they are spent."""

    def __init__(self, limits: wire.GrammarLimits) -> None:
        self._limits = limits
        self._saved_s = limits.burst_s
        self._began = time.process_time()

    def compile(self) -> None:
        _end_after(self._limits.compile_s)

    def next_token(self) -> None:
        now = time.process_time()
        earned = self._saved_s - (now - self._began) + self._limits.token_s
        self._saved_s, self._began = min(self._limits.burst_s, max(earned, self._limits.token_s)), now
        _end_after(self._saved_s)


def _end_after(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends a process that does not ask for it


def follow(connection: socket.socket, vocabulary: Any, limits: wire.GrammarLimits) -> None:
    """Compiles the grammar that comes first, and then says what may follow the tokens that come."""
    grammar, budget = wire.receive(connection, Grammar), _Budget(limits)
    budget.compile()
    before = _used_bytes()
    try:
        matcher = Matcher(vocabulary, grammar)
    except RequestError as error:
        wire.send(connection, wire.Compiled(error=f"{error.message} {error.hint}"))
        return
    budget = _Budget(limits)
    wire.send(connection, wire.Compiled(_used_bytes() - before))
    while True:
        step = wire.receive(connection, wire.Step)
        if step.restart:
            budget = _Budget(limits)
            matcher.restart()
        budget.next_token()
        _answer(connection, matcher, step)


def _answer(connection: socket.socket, matcher: Matcher, step: wire.Step) -> None:
    try:
        matcher.consume(step.tokens)
        forced = matcher.forced() if step.forced else []
        if step.forced:
            wire.send(connection, wire.Forced(forced))
        if not forced:
            wire.send(connection, wire.Mask(matcher.mask()))
    except RequestError as error:
        if step.forced:
            wire.send(connection, wire.Forced([]))
        wire.send(connection, wire.Mask(b"", f"{error.message} {error.hint}"))


def _forked(connection: socket.socket, vocabulary: Any, limits: wire.GrammarLimits) -> None:
    """The life of a process that follows one grammar; it never returns to what it was forked from."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # panics print backtraces
        _limit_memory(limits.max_bytes)
        wire.send(connection, wire.Started(os.getpid()))
        follow(connection, vocabulary, limits)
    except (EOFError, OSError):
        pass  # the engine needs no more
    finally:
        os._exit(0)


def _limit_memory(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _used_bytes() + max_bytes
    with contextlib.suppress(ValueError, OSError):  # macOS knows the limit but does not take it
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _used_bytes() -> int:
    """The size of this process's address space; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="utf-8") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


class Forks:
    """The processes that live."""

    def __init__(self, vocabulary: Any, limits: wire.GrammarLimits) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._alive: set[int] = set()
        self._ended_by: dict[int, int] = {}  # the signals of those that were killed, oldest first

    def fork(self, control: socket.socket, descriptor: int) -> None:
        with socket.socket(fileno=descriptor) as connection:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                end_with_parent(parent)  # a fork does not inherit it
                control.close()
                _forked(connection, self._vocabulary, self._limits)
            self._alive.add(pid)
            self._ended_by.pop(pid, None)  # of an earlier process with this number

    def kill(self, pid: int) -> None:
        if pid in self._alive:  # not reaped yet, so the number is still its own
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        while self._alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._bury(pid, status)

    def tell_end(self, pid: int, descriptor: int) -> None:
        """Says of which signal a process has died, or dies now. One that is unknown was another process's."""
        with socket.socket(fileno=descriptor) as connection:
            if pid in self._alive:
                self.kill(pid)  # changes nothing about one that is ending, which may take it a moment
                self._bury(*os.waitpid(pid, 0))
            wire.send(connection, wire.Ended(self._ended_by.get(pid, signal.SIGKILL)))

    def _bury(self, pid: int, status: int) -> None:
        self._alive.discard(pid)
        self._ended_by[pid] = max(0, -os.waitstatus_to_exitcode(status))
        while len(self._ended_by) > _REMEMBERED:
            del self._ended_by[next(iter(self._ended_by))]

    def close(self) -> None:
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)


def obey(control: socket.socket, forks: Forks) -> None:
    """Takes orders until the engine's end closes."""
    while True:
        forks.reap()
        if not select.select([control], [], [], _REAP_S)[0]:
            continue
        order, descriptors, _, _ = socket.recv_fds(control, wire.ORDER.size, 1)
        if len(order) < wire.ORDER.size:
            return
        name, pid = wire.ORDER.unpack(order)
        if name == b"K":
            forks.kill(pid)
            continue
        if not descriptors:  # too many open files: the engine sees its socket closed
            continue
        try:
            if name == b"E":
                forks.tell_end(pid, descriptors[0])
            else:
                forks.fork(control, descriptors[0])
        except OSError:  # no process or memory left: the engine sees its socket closed
            continue


def _line(control: socket.socket) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        more = control.recv(1 << 16)
        if not more:
            raise EOFError
        line += more
    found: dict[str, Any] = json.loads(line)
    return found


def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as control, contextlib.suppress(EOFError, OSError):
        where = _line(control)
        text = importlib.import_module(where["source"]).load_text(EngineConfig(**where["engine"]))
        control.sendall(wire.READY)
        table = _line(control)
        forks = Forks(
            prepared(text.tokenizer, table["vocab"], table["eos_ids"]), wire.GrammarLimits(**where["limits"])
        )
        gc.collect()
        gc.freeze()  # memory that is never touched again stays shared
        gc.disable()
        control.sendall(wire.READY)
        try:
            obey(control, forks)
        finally:
            forks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
