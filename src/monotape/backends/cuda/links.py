"""Memory through which ranks talk, and what their kernels are told of it: kernels/ranks.h says how it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.driver import DeviceMemory
from monotape.models.lanes import send_lag
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan

MOST_RANKS = 8
CHOICE_WORDS = 4  # score, id, whether to stop, logit
_REGIONS = ("sums", "lanes", "squares", "choices", "logits", "meetings", "rows")
_ROWS_BYTES = (
    128 << 20
)  # that a rank takes for its peers' rows of a prompt, if so few of them are worth a pass
_LEAST_ROWS = 128
_ALIGNMENT = 128
_LAST_NUMBER = 1 << 31


class InboxStruct(ctypes.Structure):
    """kernels/types.h: Inbox"""

    _fields_ = tuple((name, c_void_p) for name in _REGIONS)


class RanksStruct(ctypes.Structure):
    """kernels/types.h: Ranks"""

    _fields_ = (
        ("inbox", InboxStruct * MOST_RANKS), ("own", InboxStruct), ("steps", c_void_p), ("link_delay_ns", c_int64),
        ("rank", c_int32), ("first_id", c_int32), ("peers", c_uint32), ("first_meeting", c_uint32),
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


def row_slots(plan: Plan) -> int:
    """Sends of rows that an inbox holds. Ranks meet after every module, so fewer suffice than of single words:
    kernels/ranks_rows.h says why."""
    return send_lag(plan.steps) + 2 if sends_of(plan) else 1


def most_rows(spec: ModelSpec, plan: Plan) -> int:
    """Rows of a prompt that ranks take at a time: whole blocks of them, for which the inboxes have room."""
    row_bytes = row_slots(plan) * len(plan.ranks) * 4 * _padded(spec.width)
    return max(_LEAST_ROWS, _ROWS_BYTES // row_bytes // _LEAST_ROWS * _LEAST_ROWS)


def _padded(width: int) -> int:
    """kernels/types.h: kLinkWidth"""
    return -(-width // 8) * 8


def inbox_regions(
    spec: ModelSpec, plan: Plan, chunk: int, *, link_delay: bool = False
) -> dict[str, tuple[int, int]]:
    """Bytes of each region of an inbox, and how many lie between one sender's part and the next one's. `chunk`: rows
    of a prompt that are taken together."""
    ranks, width = len(plan.ranks), _padded(spec.width)
    workers, word = plan.machine.workers, 16 if link_delay else 8
    apart = plan.head_input != "own"
    counts = {
        "sums": (word, plan.slots * ranks * width, width),
        "lanes": (word, 2 * ranks * width if apart else 0, width),
        "squares": (word, 2 * ranks * workers if apart else 0, workers),
        "choices": (word, 2 * ranks * CHOICE_WORDS, CHOICE_WORDS),
        "logits": (word, 2 * spec.vocab, 0),
        "meetings": (word, 2 * ranks, 1),
        "rows": (4, row_slots(plan) * chunk * ranks * width, width),
    }
    return {
        name: (-(-size * count // _ALIGNMENT) * _ALIGNMENT, size * between)
        for name, (size, count, between) in counts.items()
    }


def inbox_bytes(spec: ModelSpec, plan: Plan, chunk: int, *, link_delay: bool = False) -> int:
    return sum(size for size, _ in inbox_regions(spec, plan, chunk, link_delay=link_delay).values())


class InboxMemory:
    """The inbox of one rank, on its GPU. Zeros: no word of it has been sent."""

    def __init__(self, spec: ModelSpec, plan: Plan, chunk: int, *, link_delay: bool = False) -> None:
        self._regions = inbox_regions(spec, plan, chunk, link_delay=link_delay)
        self.link_delay = link_delay
        self.memory = DeviceMemory(inbox_bytes(spec, plan, chunk, link_delay=link_delay))
        self.memory.fill(0)

    def struct(self, sender: int = 0) -> InboxStruct:
        """Where it is, or where a sender's part of each region begins."""
        struct, at = InboxStruct(), self.memory.pointer
        for name in _REGIONS:
            size, apart = self._regions[name]
            setattr(struct, name, at + sender * apart)
            at += size
        return struct

    def close(self) -> None:
        self.memory.close()


class Numbers:
    """The numbers that words carry, which no two requests may share."""

    def __init__(self) -> None:
        self.send, self.token, self.meeting = 0, 1, 1

    def take(self, tokens: int, sends: int, modules: int) -> tuple[int, int, int]:
        """For a request of at most so many tokens, each of them with so many sends, and a meeting after each module
        and one at the end: what its sends, tokens and meetings start from."""
        first = self.send, self.token, self.meeting
        self.send, self.token = self.send + (tokens + 1) * max(1, sends), self.token + tokens + 1
        self.meeting += tokens * (modules + 1)
        return first

    @property
    def used_up(self) -> bool:
        return max(self.send, self.token, self.meeting) > _LAST_NUMBER

    def start_again(self, inboxes: Sequence[InboxMemory]) -> None:
        """While no rank runs: inboxes forget everything."""
        for inbox in inboxes:
            inbox.memory.fill(0)
        self.send, self.token, self.meeting = 0, 1, 1
