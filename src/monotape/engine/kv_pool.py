"""Keeps the KV of earlier requests, so that the next turn of a conversation computes only what is new."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monotape.backends.protocol import KvSequence
from monotape.backends.token_ids import TokenIds, common_prefix
from monotape.engine.changed_prefix import Change, change_between
from monotape.errors import ResourceError

_REMEMBERED = 16  # dropped conversations, to say why one was not found
_COMPARED = 4  # conversations in which the rest of a prompt is looked for
_WORTH_A_LOOK = 128  # tokens to be computed
_SHORT = 16  # tokens; a common beginning this short is the template's, not the conversation's


@dataclass(slots=True, eq=False)
class Kept:
    """A sequence and the tokens whose KV it holds."""

    sequence: KvSequence
    tokens: TokenIds
    shared: int = 0  # leading tokens that the next more recent conversation is known to begin with too


@dataclass(frozen=True, slots=True)
class Lease:
    """A sequence in use by one job. Its first `cached` positions hold the first tokens of the prompt."""

    sequence: KvSequence
    cached: int
    miss: str | None = None  # why nothing is cached
    change: Change | None = (
        None  # why no more is cached, where the prompt is an earlier one with another beginning
    )


class KvPool:
    """At most `max_sequences` sequences and, with the newest never counted out, `max_bytes` of KV.

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
    def bytes(self) -> int:
        return sum(kept.sequence.bytes for kept in self._kept)

    def lease(self, prompt: Sequence[int], *, room: int = 0, reuse: bool = True) -> Lease:
        """The sequence that spares the most work, or an empty one. At least one token is left to compute.

        `room`: positions that prompt and answer will take. A copy has it from the start and need not be copied again.
        """
        tokens = TokenIds.of(prompt)
        best, common = self._nearest(tokens) if reuse else (None, 0)
        cached = min(common, len(tokens) - 1)
        again = common == len(tokens)  # the same prompt again: the kept answer is not part of it
        change = self._change(tokens, cached) if reuse and not again else None
        if best is None or cached == 0:
            miss = self._miss(tokens) if reuse else "the request wants figures for its whole prompt"
            return Lease(self._empty_sequence(), 0, miss, change)
        copy = None if again else self._copy(best, cached, room)
        if copy is not None:
            return Lease(copy, cached, change=change)
        self._remove(best)
        best.sequence.truncate(cached)
        return Lease(best.sequence, cached, change=change)

    def _nearest(self, tokens: TokenIds) -> tuple[Kept | None, int]:
        """The kept sequence with the longest common beginning, the shortest and oldest of such, and that length.

        Conversations that begin alike are compared with the prompt only where they differ from one another.
        """
        best, common = None, 0
        length, shared = (
            0,
            0,
        )  # of the last conversation compared: tokens in common with the prompt, with this one
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

    def _remove(self, kept: Kept) -> None:
        at = self._kept.index(kept)
        if at:
            older = self._kept[at - 1]
            older.shared = min(older.shared, kept.shared)
        del self._kept[at]

    def _change(self, tokens: TokenIds, cached: int) -> Change | None:
        """What a prompt changed near the top of one of the latest conversations, so that the rest is computed again."""
        if len(tokens) - cached < _WORTH_A_LOOK:
            return None
        latest = self._kept[-_COMPARED:]
        found = [change for kept in latest if (change := change_between(kept.tokens, tokens)) is not None]
        return max(found, key=lambda change: change.again, default=None)

    def give_back(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Keeps the sequence. `tokens` are those of the request that are known, in order from its first."""
        known = TokenIds.of(tokens)[: lease.sequence.length]
        if not known:
            return
        if self._kept:
            self._kept[-1].shared = common_prefix(self._kept[-1].tokens, known)
        self._kept.append(Kept(lease.sequence, known))
        while len(self._kept) > self._max_sequences:
            self._drop(f"only {self._max_sequences} conversations are kept")
        while len(self._kept) > 1 and self.bytes > self._max_bytes:
            self._drop(f"kept KV may take {self._max_bytes} bytes")

    def _drop(self, reason: str) -> None:
        self._dropped.append((self._kept.pop(0).tokens, reason))

    def _miss(self, tokens: TokenIds) -> str:
        """Why `tokens` start from nothing, for the log."""
        lost, reason = max(
            ((common_prefix(dropped, tokens), reason) for dropped, reason in self._dropped), default=(0, "")
        )
        if lost > _SHORT:
            return f"{lost} tokens of it were kept and dropped: {reason}"
        return "no kept conversation begins like it" if self._kept else "nothing is kept yet"

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
            self._drop(f"only {self._max_sequences} conversations are kept")
        while True:
            try:
                copy = self._new_sequence()
                copy.reserve(max(cached, room))
                copy.copy_from(kept.sequence, cached)
                return copy
            except (ResourceError, MemoryError):
                if kept is self._kept[0]:
                    return None
                self.make_room()

    def _empty_sequence(self) -> KvSequence:
        while len(self._kept) >= self._max_sequences:
            self._drop(f"only {self._max_sequences} conversations are kept")
        while True:
            try:
                return self._new_sequence()
            except (ResourceError, MemoryError):
                if not self.make_room():
                    raise

    def make_room(self) -> bool:
        """Gives the memory of the least recent conversation back; False when none is kept."""
        if self._kept:
            self._drop("its memory was needed")
            return True
        return False
