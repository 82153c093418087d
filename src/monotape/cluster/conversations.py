"""Which replica has the KV of which conversation, and which of them a request should go to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from monotape.cluster.forwarded import Unit

R = TypeVar("R", bound=Hashable)


@dataclass(slots=True)
class Match:
    """How much of a request one replica has computed already."""

    size: int = 0  # of the common prefix, in bytes of the units
    continues: bool = False  # the request is a further turn of a conversation that the replica has answered


@dataclass(slots=True)
class Kept:
    """The conversations of one replica, the one that was used last at the end."""

    conversations: OrderedDict[int, frozenset[int]] = field(default_factory=OrderedDict)

    def match(self, units: Sequence[Unit]) -> tuple[Match, int | None]:
        """The conversation that shares most with a request, by the key of its last unit."""
        best, where = Match(), None
        for last, keys in reversed(self.conversations.items()):
            shared = [unit for unit in units if unit.key in keys]
            if shared and shared[-1].end > best.size:
                whole = shared[-1].key == last
                most = not shared[-1].common and 2 * shared[-1].end >= units[-1].end
                best = Match(shared[-1].end, whole or most)
                where = last if whole else None
        return best, where

    def add(self, units: Sequence[Unit], most: int) -> None:
        """Notes a request. It takes the place of the turn that it continues; beyond `most` the oldest is dropped."""
        if not units:
            return
        _, continued = self.match(units)
        if continued is not None:
            del self.conversations[continued]
        self.conversations[units[-1].key] = frozenset(unit.key for unit in units)
        while len(self.conversations) > most:
            self.conversations.popitem(last=False)


class Conversations(Generic[R]):
    """The router's memory: conversations and running requests of every replica.

    A further turn goes to the replica of its conversation unless its queue is full. Any other request goes where fewest
    requests are, and among equals where fewest conversations are. Only then does a common prefix count: instructions
    that all conversations share must not gather all of them at one replica, where they would stay.
    """

    def __init__(self, places: int, most: int) -> None:
        self._places, self._most = (
            places,
            most,
        )  # requests that one replica takes; conversations that it keeps
        self._kept: dict[R, Kept] = {}
        self._running: dict[str, R] = {}  # requests, and where they are

    def replicas(self, present: Iterable[R]) -> None:
        """Forgets all but the replicas that are there."""
        here = set(present)
        self._kept = {replica: kept for replica, kept in self._kept.items() if replica in here}
        self._running = {request: replica for request, replica in self._running.items() if replica in here}

    def order(self, replicas: Sequence[R], units: Sequence[Unit]) -> list[R]:
        """All replicas, the best first."""
        matches = {replica: self._match(replica, units) for replica in replicas}
        ranked = sorted(
            replicas, key=lambda one: (self.running(one), self._conversations(one), -matches[one].size)
        )
        at_home = [
            replica for replica in ranked
            if matches[replica].continues and self.running(replica) < self._places
        ]  # fmt: skip
        if not at_home:
            return ranked
        home = max(at_home, key=lambda replica: matches[replica].size)
        return [home, *(replica for replica in ranked if replica != home)]

    def running(self, replica: R) -> int:
        return sum(place == replica for place in self._running.values())

    def _conversations(self, replica: R) -> int:
        kept = self._kept.get(replica)
        return 0 if kept is None else len(kept.conversations)

    def chosen(self, replica: R, request: str) -> None:
        """A request is about to go there. It counts at once: the next one is placed before this one has arrived."""
        self._running[request] = replica

    def arrived(self, replica: R, request: str, units: Sequence[Unit]) -> None:
        """A replica has taken a request, which may have ended already, and will have the KV of its prompt."""
        if request in self._running:
            self._running[request] = replica
        self._kept.setdefault(replica, Kept()).add(units, self._most)

    def ended(self, request: str) -> None:
        self._running.pop(request, None)

    def _match(self, replica: R, units: Sequence[Unit]) -> Match:
        kept = self._kept.get(replica)
        return Match() if kept is None else kept.match(units)[0]
