"""The engine's end of the grammar processes: one that forks, and a follower for each grammar."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from monotape.engine.spawn import spawn
from monotape.errors import RequestError, ResourceError
from monotape.server.grammar import wire
from monotape.server.grammar.definition import NAMES, Grammar

_LOADING_S = 600.0  # for a large vocabulary on a busy machine
_MODULE = "monotape.server.grammar.process"
#: Threads do not outlive a fork, so libraries must not count on any.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Follower:
    """A process that follows one grammar. One thread at a time asks it; any thread may kill it."""

    def __init__(self, connection: socket.socket, forks: ForkServer, limits: wire.GrammarLimits) -> None:
        self._connection, self._forks, self._limits = connection, forks, limits
        connection.settimeout(limits.wall_s)
        self.bytes = 0  # that its grammar took when it was compiled
        self._what = "The grammar"
        self._lock = threading.Lock()
        self._asked = self._dead = self._owes = False
        self._pid = wire.receive(connection, wire.Started).pid

    @property
    def usable(self) -> bool:
        """Whether it can begin another text: it is alive, and no unread answer is on its way."""
        if self._dead or self._owes:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)  # one that owes nothing and yet has something to say has ended

    def compile(self, grammar: Grammar) -> None:
        """Compiles the grammar; a RequestError when it cannot be used or goes beyond its limits."""
        self._what = NAMES[grammar.kind]
        with self._asking():
            wire.send(self._connection, grammar)
            compiled = wire.receive(self._connection, wire.Compiled)
        if compiled.error is not None:
            self.close()
            raise RequestError(compiled.error)
        self.bytes = compiled.bytes

    def ask(self, step: wire.Step) -> list[int]:
        """Sends it the chosen tokens. Answers with forced tokens if requested; if there are none, the mask is next."""
        with self._asking():
            self._owes = True
            wire.send(self._connection, step)
            forced = wire.receive(self._connection, wire.Forced).tokens if step.forced else []
            self._owes = not forced
        return forced

    def mask(self) -> bytes:
        with self._asking():
            mask = wire.receive(self._connection, wire.Mask)
            self._owes = False
        if mask.error is not None:
            self.close()
            raise RequestError(mask.error)
        return mask.bits

    def stop(self) -> None:
        """Kills it if it is at work, which then fails where it was asked for; one that waits is left alone."""
        with self._lock:
            if self._asked:
                self._forks.kill(self._pid)

    def kill(self) -> None:
        with self._lock:
            self._dead = True
            self._forks.kill(self._pid)

    def close(self) -> None:
        """For the thread that asks it. The process ends by itself when it next looks."""
        self._dead = True
        self._connection.close()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            self._asked = True
        try:
            yield
        except (EOFError, OSError):  # it was killed: by a limit, by stop(), or here for taking too long
            self._forks.kill(self._pid)
            self.close()
            raise RequestError(
                f"{self._what} went beyond its limits of time ({self._limits.compile_s:g} s to compile it) "
                f"or memory ({self._limits.max_bytes >> 20} MiB).",
                "Simplify it.",
            ) from None
        finally:
            with self._lock:
                self._asked = False


class ForkServer:
    """The process that forks, started once and again if it should die. Safe from any thread."""

    def __init__(self, source: str, engine: Mapping[str, Any], limits: wire.GrammarLimits) -> None:
        self._where = {"source": source, "engine": {**engine, "progress": False}, "limits": asdict(limits)}
        self._limits = limits
        self._table: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._start()

    def prepare(self, vocab: int, eos_ids: Sequence[int]) -> None:
        """Waits until the vocabulary is ready for grammars."""
        self._table = {"vocab": vocab, "eos_ids": list(eos_ids)}
        with self._lock:
            self._finish_start()

    def fork(self) -> Follower:
        """A process for a new grammar."""
        for _ in range(2):
            here, there = socket.socketpair()
            with there, self._lock:
                if self._process.poll() is not None:
                    self._control.close()
                    self._start()
                    self._finish_start()
                with contextlib.suppress(OSError):
                    socket.send_fds(self._control, [wire.ORDER.pack(b"F", 0)], [there.fileno()])
            try:
                return Follower(here, self, self._limits)
            except (EOFError, OSError):
                here.close()
        raise ResourceError(
            "No process could be started to follow the grammar.", "The machine may be out of memory."
        )

    def kill(self, pid: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(wire.ORDER.pack(b"K", pid))

    def close(self) -> None:
        with self._lock:
            self._control.close()
            self._process.wait()

    def _start(self) -> None:
        self._control, there = socket.socketpair()
        self._control.settimeout(_LOADING_S)
        with there:
            self._process = spawn(
                _MODULE, str(there.fileno()),
                pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
            )  # fmt: skip
        self._control.sendall(json.dumps(self._where).encode() + b"\n")

    def _finish_start(self) -> None:
        try:
            loaded = self._control.recv(1)
            self._control.sendall(json.dumps(self._table).encode() + b"\n")
            if loaded + self._control.recv(1) == wire.READY * 2:
                return
        except OSError:
            pass
        self._process.kill()
        raise ResourceError(
            "The process that follows grammars could not be started.", "The machine may be out of memory."
        )
