"""After a deadline: which word each worker of each rank waited for, and which worker or rank caused it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.plan.gpu import GpuRank

_PEER_WAIT = 1 << 30  # kernels/ranks/words.h: kPeerWait; then the peer, from bit 24 on, and the word
_PEER_SHIFT = 24
_HOST_WAIT = 1 << 29  # kernels/sampling/mask.h: kHostWait; then the word


@dataclass(frozen=True, slots=True)
class Wait:
    """One worker's last wait."""

    rank: int
    worker: int
    position: int
    layer: int
    stage: str
    order: int  # where a token passes that stage
    word: int
    peer: int | None  # the rank that owed the word; None: its own
    host: bool = False  # the host owed the word, of a mask

    @property
    def place(self) -> tuple[int, ...]:
        """How far the worker had come: the report of the worker furthest behind names the cause. Within a stage, waits
        for the own rank come before waits for peers."""
        return (
            self.position,
            self.layer,
            self.order,
            self.peer is not None,
            self.rank,
            self.worker,
        )


def waits_of(rank: GpuRank, table: NDArray[np.int32]) -> list[Wait]:
    """From kernels/plan/params.h: Exchange.waits, [workers][position, layer, stage, word]"""
    found = []
    for worker, (position, layer, stage, word) in enumerate(table.tolist()):
        if stage < 0:
            continue
        peer = word >> _PEER_SHIFT & 63 if word & _PEER_WAIT else None
        host = peer is None and bool(word & _HOST_WAIT)
        at = word & (1 << _PEER_SHIFT) - 1 if peer is not None else word & ~_HOST_WAIT
        name, order = rank.stage_names[stage], rank.stage_order[stage]
        found.append(Wait(rank.rank, worker, position, layer, name, order, at, peer, host))
    return found


def sentence(waits: Sequence[Wait], ranks: int) -> str:
    if not waits:
        return "The kernel ran into its deadline, and no worker says what it waited for."
    last = min(waits, key=lambda wait: wait.place)
    if last.peer is not None:
        return (
            f"Rank {last.rank} waited too long for rank {last.peer} in stage {last.stage} of layer {last.layer}, "
            f"for word {last.word} at position {last.position}."
        )
    if last.host:
        return f"The host gave no mask for the choice of a token, at position {last.position}."
    who = f"Worker {last.worker}" + (f" of rank {last.rank}" if ranks > 1 else "")
    return (
        f"{who} waited too long for word {last.word} of the input of stage {last.stage} in layer {last.layer}, "
        f"at position {last.position}."
    )
