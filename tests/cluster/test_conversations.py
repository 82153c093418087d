"""Which replica a request goes to."""

from __future__ import annotations

import json

from monotape.cluster.conversations import Conversations
from monotape.cluster.forwarded import Unit
from monotape.cluster.units import units_of

BOTH = ["a", "b"]


def turn(name: str, number: int, system: str = "") -> tuple[Unit, ...]:
    """The request of a turn: all turns before it with their answers."""
    messages = [{"role": "system", "content": system}] if system else []
    for index in range(number):
        messages += [
            {"role": "user", "content": f"{name} {index}"},
            {"role": "assistant", "content": "so " * 99},
        ]
    messages.append({"role": "user", "content": f"{name} {number}"})
    return units_of("/v1/chat/completions", json.dumps({"messages": messages}).encode())


def answered(conversations: Conversations[str], replica: str, request: str, units: tuple[Unit, ...]) -> None:
    conversations.chosen(replica, request)
    conversations.arrived(replica, request, units)
    conversations.ended(request)


def busy(conversations: Conversations[str], replica: str, count: int) -> None:
    for number in range(count):
        conversations.chosen(replica, f"{replica}{number}")
        conversations.arrived(replica, f"{replica}{number}", ())


def test_a_further_turn_goes_where_its_conversation_is() -> None:
    """Even though its answer is most of it, which the router never saw, and its replica is the busier one."""
    conversations = Conversations[str](places=5, most=16)
    answered(conversations, "b", "1", turn("x", 0))
    busy(conversations, "b", 4)
    assert conversations.order(BOTH, turn("x", 1)) == ["b", "a"]
    assert conversations.order(BOTH, turn("other", 0)) == ["a", "b"]


def test_a_full_queue_sends_it_elsewhere() -> None:
    conversations = Conversations[str](places=5, most=16)
    answered(conversations, "b", "1", turn("x", 0))
    busy(conversations, "b", 5)
    assert conversations.order(BOTH, turn("x", 1)) == ["a", "b"]


def test_instructions_that_all_share_do_not_gather_all_conversations_at_one_replica() -> None:
    """Nor does an idle cluster, in which every replica has as few requests as any other."""
    conversations = Conversations[str](places=5, most=16)
    places = []
    for number in range(6):
        units = turn(f"c{number}", 0, "You are helpful. " * 100)
        places.append(conversations.order(BOTH, units)[0])
        answered(conversations, places[-1], str(number), units)
    assert sorted(places) == ["a"] * 3 + ["b"] * 3


def test_a_request_counts_from_the_moment_it_is_placed() -> None:
    conversations = Conversations[str](places=5, most=16)
    first = conversations.order(BOTH, ())[0]
    conversations.chosen(first, "1")
    assert conversations.order(BOTH, ())[0] != first
    conversations.ended("1")
    assert conversations.running(first) == 0


def test_a_request_that_ended_before_its_arrival_was_told_is_not_counted_for_ever() -> None:
    conversations = Conversations[str](places=5, most=16)
    conversations.chosen("a", "1")
    conversations.ended("1")
    conversations.arrived("a", "1", turn("x", 0))
    assert conversations.running("a") == 0
    assert conversations.order(BOTH, turn("x", 1))[0] == "a"


def test_the_longest_prefix_wins() -> None:
    conversations = Conversations[str](places=5, most=16)
    answered(conversations, "a", "1", turn("x", 1))
    answered(conversations, "b", "2", turn("x", 3))
    assert conversations.order(BOTH, turn("x", 4))[0] == "b"
    assert conversations.order(BOTH, turn("x", 2))[0] == "b"  # the user went back a turn


def test_a_replica_that_is_gone_is_forgotten() -> None:
    conversations = Conversations[str](places=5, most=16)
    answered(conversations, "b", "1", turn("x", 0))
    busy(conversations, "b", 3)
    conversations.replicas(["a"])
    assert conversations.running("b") == 0
    busy(conversations, "b", 1)
    assert conversations.order(BOTH, turn("x", 1)) == ["a", "b"]


def test_as_many_conversations_are_remembered_as_a_replica_keeps() -> None:
    conversations = Conversations[str](places=5, most=2)
    for name in ("x", "y", "z"):
        answered(conversations, "b", name, turn(name, 0))
    answered(conversations, "b", "2", turn("y", 1))  # a further turn takes no second place
    busy(conversations, "b", 1)
    assert conversations.order(BOTH, turn("x", 1))[0] == "a"
    assert conversations.order(BOTH, turn("y", 2))[0] == "b"
    assert conversations.order(BOTH, turn("z", 1))[0] == "b"
