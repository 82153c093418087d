"""Finds a change near the top of a prompt that is the same further down: why KV that looks reusable is not.

Some agents put a line at the top of their instructions that differs in every call. Every token after it has to be
computed again, although its text did not change.
"""

from __future__ import annotations

from dataclasses import dataclass

from monotape.backends.token_ids import TokenIds, common_prefix

_PROBE = 32  # tokens that are searched for: long enough to be found in the same place only
_PROBES = 8  # places after the change from which such a run is taken, each twice as far as the one before
_LEAST = 64  # fewest tokens in common after the change that are reported


@dataclass(frozen=True, slots=True)
class Change:
    """Tokens `at` and on differ, and `again` tokens after them are those of an earlier prompt."""

    at: int
    again: int


def change_between(kept: TokenIds, prompt: TokenIds) -> Change | None:
    """Where a prompt departs from an earlier one and comes back to it; None where it does not come back."""
    at = common_prefix(kept, prompt)
    before, after = kept.array[at:], prompt.array[at:]
    haystack = before.tobytes()
    for power in range(_PROBES):
        start = 4 << power
        probe = after[start : start + _PROBE]
        if len(probe) < _PROBE:
            return None
        found = haystack.find(probe.tobytes())
        if found < 0 or found % 4:
            continue
        again = common_prefix(TokenIds(before[found // 4 :]), TokenIds(after[start:]))
        return Change(at, again) if again >= _LEAST else None
    return None
