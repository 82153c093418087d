"""Says why no more of a prompt was found in kept KV: for the log and the metrics, while its job runs already."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from monotape.backends.token_ids import TokenIds, common_prefix
from monotape.engine.changed_prefix import Change, change_between

_WORTH_A_LOOK = 128  # tokens to be computed
_SHORT = 16  # tokens; a common beginning this short is the template's, not the conversation's


@dataclass(frozen=True)
class Findings:
    """The conversations that were known when a prompt came, and how much of it was cached.

    Reasons are looked for when they are asked for: a first token must not wait for a search in long conversations.
    """

    prompt: TokenIds
    cached: int
    nearest: TokenIds | None = None  # the kept conversation with the longest common beginning
    latest: tuple[TokenIds, ...] = ()
    dropped: tuple[tuple[TokenIds, str], ...] = ()  # and why
    reused: bool = True  # whether the request may use KV of others

    @cached_property
    def change(self) -> Change | None:
        """What the prompt changed near the top of a recent conversation, so that the rest is computed again."""
        if not self.reused or len(self.prompt) - self.cached < _WORTH_A_LOOK:
            return None
        found = [change for kept in self.latest if (change := change_between(kept, self.prompt)) is not None]
        return max(found, key=lambda change: change.again, default=None)

    @cached_property
    def miss(self) -> str | None:
        """Why nothing is cached, or little more than the template's own tokens; None where more is."""
        if not self.reused:
            return "the request wants figures for its whole prompt"
        lost, reason = max(
            ((common_prefix(tokens, self.prompt), reason) for tokens, reason in self.dropped), default=(0, "")
        )
        if lost > self.cached + _SHORT:
            return f"{lost} tokens of it were kept and dropped: {reason}"
        if self.nearest is None:
            return "nothing is kept yet"
        whole = self.cached in (
            len(self.prompt) - 1,
            len(self.nearest),
        )  # of the prompt or of the conversation
        if self.cached > _SHORT or (whole and self.cached):
            return None
        return "no kept conversation begins like it"
