"""How ranks talk: slots, sends and the regions of an inbox. kernels/ranks/words.h says how they are used."""

from __future__ import annotations

from monotape.models.lanes import send_lag
from monotape.plan.gpu import InboxRegion, Links
from monotape.plan.types import Plan

_CHOICE_WORDS = 4  # score, id, whether to stop, logit
_ROWS_BYTES = 128 << 20  # memory for the rows of peers, unless that leaves too few rows for a pass
_LEAST_ROWS = 128
_ALIGNMENT = 128


def sends_of(plan: Plan) -> int:
    """Sends of a token."""
    return sum(step.sends for step in plan.steps)


def row_slots(plan: Plan) -> int:
    """Slots for sends of rows. Ranks meet after every module, so fewer suffice than for single words:
    kernels/ranks/rows.h has the argument."""
    return send_lag(plan.steps) + 2 if sends_of(plan) else 1


def most_rows(width: int, plan: Plan) -> int:
    """Rows of a prompt per chunk: whole blocks, as many as the inboxes have room for."""
    row_bytes = row_slots(plan) * len(plan.ranks) * 4 * _padded(width)
    return max(_LEAST_ROWS, _ROWS_BYTES // row_bytes // _LEAST_ROWS * _LEAST_ROWS)


def _padded(width: int) -> int:
    """kernels/plan/params.h: kLinkWidth"""
    return -(-width // 8) * 8


def links_of(plan: Plan, rank: int, width: int, vocab: int, chunk: int, *, link_delay: bool = False) -> Links:
    """`link_delay`: words also carry their sending time, for experiments with slow links."""
    modules = plan.modules
    late = any(step.whole and step.folds not in (None, at) for at, step in enumerate(plan.steps))
    return Links(
        rank=rank, ranks=len(plan.ranks), first_id=plan.ranks[rank].head.parts[0].first, slots=max(1, plan.slots),
        row_slots=row_slots(plan), sends=max(1, sends_of(plan)), steps=max(1, len(plan.steps)),
        late_folds=max(0, len(plan.steps) - modules), head_input=plan.head_input, keeps_own=late, delayed=link_delay,
        regions=_regions(plan, width, vocab, chunk, 16 if link_delay else 8) if plan.steps else (),
    )  # fmt: skip


def _regions(plan: Plan, width: int, vocab: int, chunk: int, word: int) -> tuple[InboxRegion, ...]:
    """The regions of an inbox, and the bytes from one sender's words to the next sender's."""
    ranks, padded, workers = len(plan.ranks), _padded(width), plan.machine.workers
    apart = plan.head_input != "own"
    counts = {
        "sums": (word, plan.slots * ranks * padded, padded),
        "lanes": (word, 2 * ranks * padded if apart else 0, padded),
        "squares": (word, 2 * ranks * workers if apart else 0, workers),
        "choices": (word, 2 * ranks * _CHOICE_WORDS, _CHOICE_WORDS),
        "logits": (word, 2 * vocab, 0),
        "meetings": (word, 2 * ranks, 1),
        "rows": (4, row_slots(plan) * chunk * ranks * padded, padded),
    }
    return tuple(
        InboxRegion(name, -(-size * count // _ALIGNMENT) * _ALIGNMENT, size * between)
        for name, (size, count, between) in counts.items()
    )
