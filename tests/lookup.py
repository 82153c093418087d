"""Drafts out of a prediction, as a backend looks them up, counted for tokens that are known already."""

from __future__ import annotations

from collections.abc import Sequence

MATCHED, DRAFTED = 2, 3  # tokens that must be the same, and tokens drafted after them


def counted_drafts(prediction: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
    """Drafts that passes would check while they make `output`, and those they would accept."""
    known = {tuple(prediction[at - MATCHED : at]): at for at in range(MATCHED, len(prediction))}
    drafted = accepted = 0
    made = 1  # by the pass over the prompt
    while made < len(output):
        at = known.get(tuple(output[made - MATCHED : made])) if made >= MATCHED else None
        drafts = [] if at is None else list(prediction[at : at + DRAFTED])
        right = 0
        while right < len(drafts) and output[made + right : made + right + 1] == [drafts[right]]:
            right += 1
        drafted, accepted = drafted + len(drafts), accepted + right
        made += right + 1
    return drafted, min(accepted, len(output) - 1)
