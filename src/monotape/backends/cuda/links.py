"""The inboxes of ranks, and the parameters that describe them; kernels/ranks/words.h says how they are used."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory
from monotape.plan.gpu import MOST_RANKS, Links
from monotape.plan.types import Plan

_REGIONS = ("sums", "lanes", "squares", "choices", "logits", "meetings", "rows")
_LAST_NUMBER = 1 << 31


class InboxStruct(ctypes.Structure):
    """kernels/plan/params.h: Inbox"""

    _fields_ = tuple((name, c_void_p) for name in _REGIONS)


class RanksStruct(ctypes.Structure):
    """kernels/plan/params.h: Ranks"""

    _fields_ = (
        ("inbox", InboxStruct * MOST_RANKS), ("own", InboxStruct), ("steps", c_void_p), ("link_delay_ns", c_int64),
        ("rank", c_int32), ("first_id", c_int32), ("peers", c_uint32), ("first_meeting", c_uint32),
        ("first_send", c_uint32), ("first_token", c_uint32),
    )  # fmt: skip


def step_table(plan: Plan) -> NDArray[Any]:
    """kernels/plan/params.h: RankStep, one a step of the plan"""
    table = np.zeros(len(plan.steps), [("own", "f4"), ("sends", "i4"), ("folds", "i4"), ("whole", "i4")])
    number: dict[int, int] = {}
    for module, step in enumerate(plan.steps):
        if step.sends:
            number[module] = len(number) + 1
        folds = 0 if step.folds is None else number[step.folds]
        table[module] = (step.own, number.get(module, 0), folds, step.whole)
    return table


class InboxMemory:
    """The inbox of one rank, on its GPU. Zeros: no word of it has been sent."""

    def __init__(self, links: Links) -> None:
        self._regions = {region.name: region for region in links.regions}
        self.memory = DeviceMemory(links.inbox_bytes, for_peers=True)
        self.memory.fill(0)

    def struct(self, sender: int = 0) -> InboxStruct:
        """Where it is, or where a sender's part of each region begins."""
        struct, at = InboxStruct(), self.memory.pointer
        for name in _REGIONS:
            region = self._regions[name]
            setattr(struct, name, at + sender * region.sender_bytes)
            at += region.bytes
        return struct

    def close(self) -> None:
        self.memory.close()


class Numbers:
    """The numbers that words carry, which no two requests may share."""

    def __init__(self) -> None:
        self.send, self.token, self.meeting = 0, 1, 1

    def take(self, tokens: int, sends: int, modules: int) -> tuple[int, int, int]:
        """The first numbers of sends, tokens and meetings for a request of at most `tokens` tokens, each with `sends`
        sends, a meeting after each module and one at the end."""
        first = self.send, self.token, self.meeting
        self.send, self.token = self.send + (tokens + 1) * max(1, sends), self.token + tokens + 1
        self.meeting += tokens * (modules + 1)
        return first

    @property
    def used_up(self) -> bool:
        return max(self.send, self.token, self.meeting) > _LAST_NUMBER

    def start_again(self, inboxes: Sequence[InboxMemory]) -> None:
        """Clears all inboxes and restarts the numbers. No rank may be running."""
        for inbox in inboxes:
            inbox.memory.fill(0)
        self.send, self.token, self.meeting = 0, 1, 1
