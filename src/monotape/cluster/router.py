"""Ray Serve's request router for replicas that keep conversations.

Ray's own PrefixCacheAffinityRouter compares characters of prompts. It cannot know answers, so the second turn after a
short question with a long answer has no replica; it knows no full queue; and it needs the packages of `ray[llm]`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from monotape.cluster.conversations import Conversations
from monotape.cluster.forwarded import Forwarded, Unit


class ConversationRouter(RequestRouter):  # type: ignore[misc]  # mypy skips Ray
    """Sends a request to the replica that conversations.py puts first, unless Ray finds that it takes no more."""

    def initialize_state(self, *, places: int, most_conversations: int) -> None:
        self._conversations: Conversations[ReplicaID] = Conversations(places, most_conversations)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        known = {replica.replica_id: replica for replica in candidate_replicas}
        order = self._conversations.order(list(known), _units(pending_request))
        if pending_request is not None and order:
            pending_request.routing_context.should_backoff = True  # where no replica takes it, wait a little
            self._choose(pending_request, order[0])
        return [[known[replica_id]] for replica_id in order]

    def _choose(self, pending: PendingRequest, replica_id: ReplicaID) -> None:
        request_id: str = pending.metadata.internal_request_id
        self._conversations.chosen(replica_id, request_id)

        def settled(future: asyncio.Future[Any]) -> None:
            if future.cancelled():  # its client left before it was sent anywhere
                self._conversations.ended(request_id)

        pending.future.add_done_callback(settled)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request_id = pending_request.metadata.internal_request_id
        self._conversations.arrived(replica_id, request_id, _units(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._conversations.ended(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._conversations.replicas(replica.replica_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._conversations.replicas(known for known in self.curr_replicas if known != replica_id)


def _units(pending: PendingRequest | None) -> tuple[Unit, ...]:
    first = pending.args[0] if pending is not None and pending.args else None
    return first.units if isinstance(first, Forwarded) else ()
