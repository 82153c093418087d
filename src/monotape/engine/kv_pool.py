"""Keeps the KV of earlier requests, so that the next turn of a conversation computes only what is new."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import Backend, Generation, Job, KvSequence, MaskedGeneration, TakesMasks
from monotape.backends.token_ids import TokenIds, common_prefix
from monotape.engine.cache_misses import Findings
from monotape.errors import ResourceError

_REMEMBERED = 16  # dropped conversations, to say why one was not found
_MEMORY = "its memory was needed"
_ANSWERED_AGAIN = "an earlier prompt of it was answered again"
_COMPARED = 4  # conversations in which the rest of a prompt is looked for
Begun = TypeVar("Begun")
_LITTLE = 16  # tokens of later prompts that are not worth a copy


@runtime_checkable
class Shrinks(Protocol):
    """A KvSequence that can give back memory which none of its positions uses."""

    def shrink(self) -> bool:
        """Moves into less memory where less than half of it is used; False where nothing was to be gained."""
        ...


@dataclass(slots=True, eq=False)
class Kept:
    """A sequence and the tokens whose KV it holds."""

    sequence: KvSequence
    tokens: TokenIds
    asked: int  # leading tokens that were its latest prompt; those after them are the answer
    shared: int = 0  # leading tokens that the next more recent conversation is known to begin with too


@dataclass(frozen=True, slots=True)
class Lease:
    """A sequence in use by one job. Its first `cached` positions hold the first tokens of the prompt."""

    sequence: KvSequence
    cached: int
    findings: Findings  # why no more is cached


class KvPool:
    """At most `max_sequences` sequences and, with the newest never counted out, `max_bytes` of KV.

    A sequence that is given back may exceed these limits until `trim` or the next `lease`: moving KV into less memory
    takes a while, and the end of an answer must not wait for it. It takes no more memory than while its job ran.

    A leased sequence is not in the pool: one whose job failed is dropped by never being given back.
    """

    __slots__ = ("_dropped", "_kept", "_max_bytes", "_max_sequences", "_new_sequence")

    def __init__(self, new_sequence: Callable[[], KvSequence], *, max_sequences: int, max_bytes: int) -> None:
        self._new_sequence = new_sequence
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._kept: list[Kept] = []  # the most recent last
        self._dropped: deque[tuple[TokenIds, str]] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def _too_many(self) -> str:
        return f"only {self._max_sequences} conversations are kept"

    @property
    def bytes(self) -> int:
        return sum(kept.sequence.bytes for kept in self._kept)

    def lease(self, prompt: Sequence[int], *, room: int = 0, reuse: bool = True) -> Lease:
        """The sequence that spares the most work, or an empty one. At least one token is left to compute.

        `room`: positions that prompt and answer will take. A copy has it from the start and need not be copied again.
        """
        self.trim()
        tokens = TokenIds.of(prompt)
        best, common = self._nearest(tokens) if reuse else (None, 0)
        cached = min(common, len(tokens) - 1)
        findings = self._findings(tokens, cached, best, reuse)
        if best is None or cached == 0:
            return Lease(self._empty_sequence(), 0, findings)
        # The same prompt again: the new answer takes the place of the kept one. Later turns go on beside it.
        branches = common < len(tokens) or best.asked > len(tokens) + _LITTLE
        copy = self._copy(best, cached, room) if branches else None
        if copy is not None:
            return Lease(copy, cached, findings)
        reason = self._too_many if len(self._kept) >= self._max_sequences else _MEMORY
        self._take(best, cached, reason if branches else _ANSWERED_AGAIN)
        return Lease(best.sequence, cached, findings)

    def _findings(self, tokens: TokenIds, cached: int, best: Kept | None, reuse: bool) -> Findings:
        latest = tuple(kept.tokens for kept in self._kept[-_COMPARED:])
        nearest = None if best is None else best.tokens
        return Findings(tokens, cached, nearest, latest, tuple(self._dropped), reuse)

    def _nearest(self, tokens: TokenIds) -> tuple[Kept | None, int]:
        """The kept sequence with the longest common beginning, the shortest and oldest of such, and that length.

        Conversations that begin alike are compared with the prompt only where they differ from one another.
        """
        best, common = None, 0
        length = 0  # tokens that the last conversation compared has in common with the prompt
        shared = 0  # and with the conversation that is looked at
        for kept in reversed(self._kept):  # the latest is most often the one
            known = kept.tokens
            shared = min(shared, kept.shared)
            if common and (len(known) < common or known.array[common - 1] != tokens.array[common - 1]):
                continue  # it cannot have as long a beginning, and most of 50 conversations are told by one token
            if length >= shared:
                length = common_prefix(known, tokens, shared)
            shared = len(known)
            if best is None or (length, -len(known)) >= (common, -len(best.tokens)):
                best, common = kept, length
        return best, common

    def _take(self, kept: Kept, cached: int, reason: str) -> None:
        """Takes a sequence out of the pool. What it holds beyond the prompt is lost, for that reason."""
        at = self._kept.index(kept)
        if at:
            older = self._kept[at - 1]
            older.shared = min(older.shared, kept.shared)
        del self._kept[at]
        kept.sequence.truncate(cached)
        again = reason == _ANSWERED_AGAIN and any(
            why == reason and common_prefix(tokens, kept.tokens) > cached for tokens, why in self._dropped
        )
        if cached < len(kept.tokens) and not again:  # one entry for a prompt that is answered many times
            self._dropped.append((kept.tokens, reason))

    def give_back(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Keeps the sequence. `tokens` are those of the request that are known, in order from its first."""
        known = TokenIds.of(tokens)[: lease.sequence.length]
        if not known:
            return
        if self._kept:
            self._kept[-1].shared = common_prefix(self._kept[-1].tokens, known)
        self._kept.append(Kept(lease.sequence, known, min(len(lease.findings.prompt), len(known))))

    def trim(self) -> None:
        """Gives back memory, and then conversations, the least recent first, until the limits hold."""
        while len(self._kept) > self._max_sequences:
            self._drop(self._too_many)
        while len(self._kept) > 1 and self.bytes > self._max_bytes:
            if not self._shrink():
                self._drop(f"kept KV may take {self._max_bytes} bytes")

    def _shrink(self) -> bool:
        """Gives back memory that a kept conversation does not use, the least recent one's first.

        A request reserves room for its longest answer. The rest of that room is given back only when others need it:
        the next turn of the conversation would have to reserve it again.
        """
        for kept in self._kept:
            if isinstance(kept.sequence, Shrinks):
                try:
                    if kept.sequence.shrink():
                        return True
                except (ResourceError, MemoryError):  # a smaller copy has to fit beside what it replaces
                    return False
        return False

    def _drop(self, reason: str) -> None:
        self._dropped.append((self._kept.pop(0).tokens, reason))

    def clear(self) -> None:
        self._kept.clear()

    def _copy(self, kept: Kept, cached: int, room: int) -> KvSequence | None:
        """The common beginning of two conversations, so that both can go on.

        None where nothing else of the kept one would be lost, where it is the next to give way, or without memory.
        """
        full = len(self._kept) >= self._max_sequences
        if len(kept.tokens) == cached or (full and kept is self._kept[0]):
            return None
        if full:
            self._drop(self._too_many)
        while True:
            try:
                copy = self._new_sequence()
                copy.reserve(max(cached, room))
                copy.copy_from(kept.sequence, cached)
                return copy
            except (ResourceError, MemoryError):
                if self._shrink():
                    continue
                if kept is self._kept[0]:
                    return None
                self._drop(_MEMORY)

    def _empty_sequence(self) -> KvSequence:
        while len(self._kept) >= self._max_sequences:
            self._drop(self._too_many)
        return self.with_room(self._new_sequence)

    def with_room(self, begin: Callable[[], Begun]) -> Begun:
        """What `begin` gives. Where memory is short, it is called again when kept conversations have given way."""
        while True:
            try:
                return begin()
            except (ResourceError, MemoryError):
                if not self.make_room():
                    raise

    def make_room(self) -> bool:
        """Gives memory of kept conversations back, of the least recent one all of it; False when none is kept."""
        if self._kept and not self._shrink():
            self._drop(_MEMORY)
            return True
        return bool(self._kept)


class RoomyBackend:
    """Of a backend the calls at which a sequence grows: where memory is short, kept conversations give way.

    Not a stream's methods: a job that calls these while it is read would keep a dropped stream alive.
    """

    __slots__ = ("_backend", "_pool")

    def __init__(self, backend: Backend, pool: KvPool) -> None:
        self._backend, self._pool = backend, pool

    def start(self, job: Job, sequence: KvSequence) -> Generation:
        return self._pool.with_room(partial(self._backend.start, job, sequence))

    def start_masked(self, job: Job, sequence: KvSequence) -> MaskedGeneration:
        assert isinstance(self._backend, TakesMasks)
        return self._pool.with_room(partial(self._backend.start_masked, job, sequence))

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        return self._pool.with_room(partial(self._backend.logits, tokens, sequence))
