"""Memory through which ranks talk, and what their kernels are told of it: kernels/ranks.h says how it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan

MOST_RANKS = 8
CHOICE_WORDS = 4  # score, id, whether to stop, logit
_REGIONS = ("sums", "lanes", "squares", "choices", "logits")
_ALIGNMENT = 128
_LAST_NUMBER = 1 << 31


class InboxStruct(ctypes.Structure):
    """kernels/types.h: Inbox"""

    _fields_ = tuple((name, c_void_p) for name in _REGIONS)


class RanksStruct(ctypes.Structure):
    """kernels/types.h: Ranks"""

    _fields_ = (
        ("inbox", InboxStruct * MOST_RANKS), ("own", InboxStruct), ("steps", c_void_p), ("link_delay_ns", c_int64),
        ("rank", c_int32), ("first_id", c_int32), ("peers", c_uint32), ("spare", c_uint32),
        ("first_send", c_uint32), ("first_token", c_uint32),
    )  # fmt: skip


def sends_of(plan: Plan) -> int:
    """Sends of a token."""
    return sum(step.sends for step in plan.steps)


def keeps_own(plan: Plan) -> bool:
    """Whether a rank needs its own partial again, later than it made it."""
    return any(step.whole and step.folds not in (None, at) for at, step in enumerate(plan.steps))


def step_table(plan: Plan) -> NDArray[Any]:
    """kernels/types.h: RankStep, one a step of the plan"""
    table = np.zeros(len(plan.steps), [("own", "f4"), ("sends", "i4"), ("folds", "i4"), ("whole", "i4")])
    number: dict[int, int] = {}
    for module, step in enumerate(plan.steps):
        if step.sends:
            number[module] = len(number) + 1
        folds = 0 if step.folds is None else number[step.folds]
        table[module] = (step.own, number.get(module, 0), folds, step.whole)
    return table


def inbox_words(spec: ModelSpec, plan: Plan) -> dict[str, tuple[int, int]]:
    """Words of each region of an inbox, and of those how many lie between one sender's and the next one's."""
    ranks, width = len(plan.ranks), -(-spec.width // 8) * 8
    workers = plan.machine.workers
    apart = plan.head_input != "own"
    return {
        "sums": (plan.slots * ranks * width, width),
        "lanes": (2 * ranks * width if apart else 0, width),
        "squares": (2 * ranks * workers if apart else 0, workers),
        "choices": (2 * ranks * CHOICE_WORDS, CHOICE_WORDS),
        "logits": (2 * spec.vocab, 0),
    }


def inbox_bytes(spec: ModelSpec, plan: Plan, *, link_delay: bool = False) -> int:
    return sum(_region_bytes(words, link_delay) for words, _ in inbox_words(spec, plan).values())


def _region_bytes(words: int, link_delay: bool) -> int:
    return -(-words * (16 if link_delay else 8) // _ALIGNMENT) * _ALIGNMENT


class InboxMemory:
    """The inbox of one rank, on its GPU. Zeros: no word of it has been sent."""

    def __init__(self, spec: ModelSpec, plan: Plan, *, link_delay: bool = False) -> None:
        self._regions = inbox_words(spec, plan)
        self.link_delay = link_delay
        self.memory = DeviceMemory(inbox_bytes(spec, plan, link_delay=link_delay))
        self.memory.fill(0)

    def struct(self, sender: int = 0) -> InboxStruct:
        """Where it is, or where a sender's part of each region begins."""
        struct, at = InboxStruct(), self.memory.pointer
        for name in _REGIONS:
            words, apart = self._regions[name]
            setattr(struct, name, at + sender * apart * (16 if self.link_delay else 8))
            at += _region_bytes(words, self.link_delay)
        return struct

    def close(self) -> None:
        self.memory.close()


class Numbers:
    """The numbers that words carry, which no two requests may share."""

    def __init__(self) -> None:
        self.send, self.token = 0, 1

    def take(self, tokens: int, sends: int) -> tuple[int, int]:
        """For a request of at most so many tokens: what its sends, and its tokens, start from."""
        first = self.send, self.token
        self.send, self.token = self.send + (tokens + 1) * max(1, sends), self.token + tokens + 1
        return first

    @property
    def used_up(self) -> bool:
        return max(self.send, self.token) > _LAST_NUMBER

    def start_again(self, inboxes: Sequence[InboxMemory]) -> None:
        """While no rank runs: inboxes forget everything."""
        for inbox in inboxes:
            inbox.memory.fill(0)
        self.send, self.token = 0, 1
