"""The grammars of an engine process: compiled while another completion runs, and kept for later requests."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monotape.backends.protocol import Bits
from monotape.engine.constraint import from_bytes
from monotape.server.grammar.definition import Grammar
from monotape.server.grammar.followers import Follower, ForkServer
from monotape.server.grammar.wire import GrammarLimits, Step

#: Followers that wait for their grammar to be asked for: by requests in the queue, or by the next ones. What does not
#: fit is compiled again, so the default queue fits and nothing a client sends fills the memory.
MAX_KEPT = 32
MAX_KEPT_BYTES = 1 << 30


class Grammars:
    """Followers at work by the id of their job, and idle ones by grammar. Safe from any thread."""

    def __init__(self, source: str, engine: Mapping[str, Any], limits: GrammarLimits | None = None) -> None:
        self._forks = ForkServer(source, engine, limits or GrammarLimits())
        self._lock = threading.Lock()
        self._idle: collections.OrderedDict[Grammar, Follower] = collections.OrderedDict()
        self._working: dict[int, Follower] = {}
        self._starting: set[int] = set()  # jobs that still want the process that is being started for them
        self._vocab = 0

    def prepare(self, vocab: int, eos_ids: Sequence[int]) -> None:
        self._vocab = vocab
        self._forks.prepare(vocab, eos_ids)

    def compile(self, job_id: int, grammar: Grammar) -> None:
        """Compiles a grammar for later; a RequestError when it cannot be used."""
        with self._follower(job_id, grammar):
            pass

    @contextlib.contextmanager
    def constraint(self, job_id: int, grammar: Grammar) -> Iterator[GrammarConstraint]:
        """The grammar for one text."""
        with self._follower(job_id, grammar) as follower:
            yield GrammarConstraint(follower, self._vocab)

    def stop(self, job_id: int) -> None:
        """Ends the work on a grammar whose request is gone."""
        with self._lock:
            self._starting.discard(job_id)
            if (follower := self._working.get(job_id)) is not None:
                follower.kill()

    def close(self) -> None:
        self._forks.close()
        with self._lock:
            while self._idle:
                self._idle.popitem()[1].close()

    def __enter__(self) -> Grammars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _follower(self, job_id: int, grammar: Grammar) -> Iterator[Follower]:
        with self._lock:
            self._starting.add(job_id)
            kept = self._idle.pop(grammar, None)
        if kept is not None and not kept.usable:
            kept.close()
            kept = None
        follower = kept
        try:
            follower = follower or self._forks.fork()
        finally:
            with self._lock:
                wanted = job_id in self._starting
                self._starting.discard(job_id)
                if follower is not None:
                    self._working[job_id] = follower
        try:
            if not wanted:
                follower.kill()
            if kept is None:
                follower.compile(grammar)
            yield follower
        finally:
            self._put_back(job_id, grammar, follower)

    @property
    def _kept_bytes(self) -> int:
        return sum(follower.bytes for follower in self._idle.values())

    def _put_back(self, job_id: int, grammar: Grammar, follower: Follower) -> None:
        with self._lock:
            del self._working[job_id]
            unwanted: list[Follower | None] = [follower]
            if follower.usable:
                unwanted = [self._idle.pop(grammar, None)]
                self._idle[grammar] = follower
            while len(self._idle) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
                unwanted.append(self._idle.popitem(last=False)[1])
        for other in unwanted:
            if other is not None:
                other.close()


class GrammarConstraint:
    """One text in the making, checked against its grammar."""

    def __init__(self, follower: Follower, vocab: int) -> None:
        self._follower, self._vocab = follower, vocab
        self._untold: list[int] = []
        self._fresh = True  # the follower's last text was another
        self._told = False

    def forced(self) -> list[int]:
        return self._ask(forced=True)

    def allowed(self) -> Bits:
        if not self._told:
            self._ask(forced=False)
        self._told = False
        return from_bytes(self._follower.mask(), self._vocab)

    def accept(self, token_id: int) -> None:
        self._untold.append(token_id)

    def cancel(self) -> None:
        self._follower.stop()

    def _ask(self, *, forced: bool) -> list[int]:
        tokens, self._untold = self._untold, []
        step = Step(tokens, restart=self._fresh, forced=forced)
        self._fresh = False
        found = self._follower.ask(step)
        self._told = not found
        return found
