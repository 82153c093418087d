"""The engine's end of the grammar processes: one that forks, and a follower for each grammar."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
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
_END_S = 2.0  # to be told what has ended a follower; a request waits for it
_MODULE = "monotape.server.grammar.process"
#: Threads do not outlive a fork, so libraries must not count on any.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
#: Signals that neither a limit of a follower sends nor a fault within it: the system or an operator has killed it.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Follower:
    """A process that follows one grammar. One thread at a time asks it; any thread may kill it."""

    def __init__(self, connection: socket.socket, forks: ForkServer, limits: wire.GrammarLimits) -> None:
        self._connection, self._forks, self._limits = connection, forks, limits
        connection.settimeout(limits.compile_wall_s)
        self.bytes = 0  # that its grammar took when it was compiled
        self._what = "The grammar"
        self._lock = threading.Lock()
        self._asked = self._dead = self._owes = self._stopped = False
        self._pid = wire.receive(connection, wire.Started).pid

    @property
    def usable(self) -> bool:
        """Whether it can begin another text: it is alive, and no unread answer is on its way."""
        if self._dead or self._owes or self._stopped:
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
        self._connection.settimeout(self._limits.wall_s)  # from here on a backend may be waiting

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
                self._stopped = True
                self._forks.kill(self._pid)

    def kill(self) -> None:
        with self._lock:
            self._dead = self._stopped = True
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
        except TimeoutError:  # it hangs
            self._forks.kill(self._pid)
            self.close()
            raise self._beyond_limits() from None
        except (EOFError, OSError):
            self.close()
            raise self._ended() from None
        finally:
            with self._lock:
                self._asked = False

    def _ended(self) -> RequestError | ResourceError:
        """Why it has ended: by a limit or a fault of its own, by stop(), or because something else killed it."""
        ended_by = 0 if self._stopped else self._forks.ended_by(self._pid)
        if ended_by not in _FROM_OUTSIDE:
            return self._beyond_limits()
        return ResourceError(
            f"The process that followed the grammar was killed from outside ({signal.Signals(ended_by).name}).",
            "Try again; the machine may be short of memory.",
        )

    def _beyond_limits(self) -> RequestError:
        return RequestError(
            f"{self._what} went beyond its limits of time ({self._limits.compile_s:g} s to compile it) "
            f"or memory ({self._limits.max_bytes >> 20} MiB).",
            "Simplify it.",
        )


class ForkServer:
    """The process that forks, started once and again if it should die. Safe from any thread."""

    def __init__(self, source: str, engine: Mapping[str, Any], limits: wire.GrammarLimits) -> None:
        self._where = {"source": source, "engine": {**engine, "progress": False}, "limits": asdict(limits)}
        self._limits = limits
        self._table: dict[str, Any] = {}
        self._starting = threading.Lock()  # held for as long as a vocabulary takes to load
        self._orders = threading.Lock()  # held for a moment, so that to kill a follower never takes long
        self._ready = False  # to take orders
        self._start()

    def prepare(self, vocab: int, eos_ids: Sequence[int]) -> None:
        """Waits until the vocabulary is ready for grammars."""
        self._table = {"vocab": vocab, "eos_ids": list(eos_ids)}
        with self._starting:
            self._finish_start()

    def fork(self) -> Follower:
        """A process for a new grammar."""
        why = ""
        for _ in range(2):
            try:
                return self._fork()
            except (EOFError, OSError) as error:
                why = f": {error}" if str(error) else ""
        raise ResourceError(
            f"No process could be started to follow the grammar{why}.",
            "Try again; the machine may be out of memory, processes or open files.",
        )

    def _fork(self) -> Follower:
        here, there = socket.socketpair()
        try:
            with there:
                with self._starting:
                    if self._process.poll() is not None:
                        self._start_again()
                self._order(b"F", 0, there)
            return Follower(here, self, self._limits)
        except BaseException:
            here.close()
            raise

    def ended_by(self, pid: int) -> int:
        """The signal that has ended a follower, 0 for none. It ends with the process that forks, of SIGKILL."""
        try:
            here, there = socket.socketpair()
            with here:
                here.settimeout(_END_S)
                with there:
                    self._order(b"E", pid, there)
                return wire.receive(here, wire.Ended).signal
        except (EOFError, OSError):
            return signal.SIGKILL

    def kill(self, pid: int) -> None:
        """Does nothing while the process that forks is started again: its followers have ended with the last one."""
        self._order(b"K", pid)

    def close(self) -> None:
        with self._starting, self._orders:
            self._ready = False
            self._control.close()
            self._process.wait()

    def _order(self, name: bytes, pid: int, *answers: socket.socket) -> None:
        """Sends an order. Where nothing is there to take it, the socket for the answer closes unanswered."""
        with self._orders, contextlib.suppress(OSError):
            if self._ready:
                descriptors = [answer.fileno() for answer in answers]
                socket.send_fds(self._control, [wire.ORDER.pack(name, pid)], descriptors)

    def _start_again(self) -> None:
        with self._orders:
            self._ready = False
            self._control.close()
        self._start()
        self._finish_start()

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
                with self._orders:
                    self._ready = True
                return
        except OSError:
            pass
        self._process.kill()
        raise ResourceError(
            "The process that follows grammars could not be started.", "The machine may be out of memory."
        )
