"""What drafts are worth: kept over requests, to choose the kernel of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import Token

_OLDER = 0.5  # what earlier answers count beside the last one
_LEAST = 16  # tokens that say anything; an answer of fewer counts less
_FARTHEST = 1 << 14  # tokens that are searched
_USUAL_COST = 1.25  # a pass with drafts beside one without, until both have been timed


@dataclass(slots=True)
class Worth:
    """Tokens a pass, and nanoseconds a pass of either kernel, of the last answers."""

    tokens: float = 0.0
    passes: float = 0.0
    alone_ns: float | None = None
    drafting_ns: float | None = None

    @property
    def pays(self) -> bool:
        """Whether drafts save more passes than they cost. As long as too little is known: yes, to find out."""
        return self.tokens < _LEAST or self.tokens / self.passes > self.cost

    @property
    def cost(self) -> float:
        if self.alone_ns is None or self.drafting_ns is None:
            return _USUAL_COST
        return self.drafting_ns / self.alone_ns

    def learn(self, tokens: Sequence[Token], accepted: int) -> None:
        """From an answer of the kernel that checks drafts."""
        count = len(tokens) - 1
        passes = count - accepted
        if passes > 0:
            self.drafting_ns = _mean(self.drafting_ns, _elapsed(tokens) / passes, count)
            self._add(count, passes)

    def learn_alone(self, prompt: Sequence[int], tokens: Sequence[Token], rows: int) -> None:
        """From an answer of the other kernel: what lookup would have found for it."""
        count = len(tokens) - 1
        if count < 1:
            return
        self.alone_ns = _mean(self.alone_ns, _elapsed(tokens) / count, count)
        text = _newest_ids(prompt, tokens)
        searched = min(count, len(text))
        self._add(searched, passes_with_lookup(text, searched, rows))

    def _add(self, tokens: int, passes: int) -> None:
        older = _older(tokens)
        self.tokens = older * self.tokens + tokens
        self.passes = older * self.passes + passes


def _elapsed(tokens: Sequence[Token]) -> float:
    return float(tokens[-1].time_ns - tokens[0].time_ns)


def _older(count: int) -> float:
    """What earlier answers count beside one of so many tokens."""
    return float(_OLDER ** min(1.0, count / _LEAST))


def _mean(before: float | None, now: float, count: int) -> float:
    older = _older(count)
    return now if before is None else older * before + (1 - older) * now


def _newest_ids(prompt: Sequence[int], tokens: Sequence[Token]) -> NDArray[np.int64]:
    """The last ids of prompt and answer, without a loop over those of the prompt: a user waits for it."""
    output = [token.id for token in tokens[-_FARTHEST:]]
    before = prompt[max(0, len(prompt) - (_FARTHEST - len(output))) :]
    return np.concatenate([np.asarray(before, np.int64), np.asarray(output, np.int64)])


def passes_with_lookup(text: NDArray[np.int64], count: int, rows: int) -> int:
    """Passes that the last `count` tokens take if each checks drafts: what followed the two tokens before them the last
    time. An estimate: the kernel's own lookup (kernels/worker/drafter.h) looks for longer matches."""
    found = _followed(text)[len(text) - count :].tolist()
    passes = at = 0
    while at < count:
        passes += 1
        for _ in range(rows - 1):
            if at == count or not found[at]:
                break
            at += 1
        at += 1
    return passes


def _followed(text: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each token, whether it followed the two tokens before it the last time that they stood together."""
    found = np.zeros(len(text), np.bool_)
    pairs = text[:-2] << 32 | text[1:-1]  # those before tokens 2, 3, ...
    order = np.argsort(pairs, kind="stable")
    again = pairs[order[1:]] == pairs[order[:-1]]
    here, before = order[1:][again], order[:-1][again]
    found[here + 2] = text[here + 2] == text[before + 2]
    return found
