"""How likely the model finds each token of a prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from monotape.backends.protocol import Backend, FinishReason, Generation, KvSequence, Token, drafts_of
from monotape.engine.kv_pool import RoomyBackend
from monotape.engine.outputs import Logprob, TokenLogprobs, token_logprobs

_ROWS = 64  # rows of logits in memory at a time


class ScoredGeneration:
    """A Generation that scores its prompt before it begins the answer; computed as it is read.

    A backend gives logits piece after piece, and between two pieces a cancellation is noticed.
    """

    def __init__(self, scores: Iterator[TokenLogprobs], begin: Callable[[], Generation]) -> None:
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # until all of them are there
        self._scores, self._begin = scores, begin
        self._answer: Generation | None = None
        self._given_up = False
        self._scored = 0
        self._cancelled = threading.Event()
        self._tokens = self._run()

    @property
    def finish_reason(self) -> FinishReason | None:
        if self._answer is not None:
            return self._answer.finish_reason
        return "cancelled" if self._given_up else None

    @property
    def start_ns(self) -> int:
        """When the answer began, by the backend's clock, which cannot be read before that."""
        return 0 if self._answer is None else self._answer.start_ns

    @property
    def filled(self) -> int:
        """All scores of a piece come at once: what counts is that another one has come."""
        return self._scored if self._answer is None else self._answer.filled

    @property
    def drafted(self) -> int:
        return 0 if self._answer is None else drafts_of(self._answer)[0]

    @property
    def accepted(self) -> int:
        return 0 if self._answer is None else drafts_of(self._answer)[1]

    def __iter__(self) -> Iterator[Token]:
        """An interrupt may end the iterator and not the job: a second iteration yields the rest."""
        return self._tokens if self._answer is None else iter(self._answer)

    def cancel(self) -> None:
        self._cancelled.set()
        if (answer := self._answer) is not None:
            answer.cancel()

    def _run(self) -> Iterator[Token]:
        scores: list[TokenLogprobs | None] = [None]  # nothing precedes the first token
        while not self._cancelled.is_set():
            if (shown := next(self._scores, None)) is None:
                self.prompt_logprobs = scores
                yield from self._answered()
                return
            scores.append(shown)
            self._scored += 1
        self._given_up = True

    def _answered(self) -> Iterator[Token]:
        self._answer = answer = self._begin()
        if self._cancelled.is_set():
            answer.cancel()
        yield from answer


def score_prompt(
    backend: Backend | RoomyBackend,
    sequence: KvSequence,
    prompt: Sequence[int],
    top: int,
    text_of: Callable[[int], str] | None,
) -> Iterator[TokenLogprobs]:
    """Log-probabilities of all prompt tokens but the first, one by one, computed in pieces as they are asked for.

    Fills the empty sequence with the KV of all tokens but the last: that one is left for the job.
    """
    for start in range(0, len(prompt) - 1, _ROWS):
        given = prompt[start : min(start + _ROWS, len(prompt) - 1)]
        logits = backend.logits(given, sequence).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for offset, row in enumerate(rows):
            yield _shown(row, prompt[start + offset + 1], top, text_of)


def _shown(
    row: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    token_id: int,
    top: int,
    text_of: Callable[[int], str] | None,
) -> TokenLogprobs:
    best = np.argsort(-row, kind="stable")[:top]
    likely = tuple((int(index), float(row[index])) for index in best)
    shown = token_logprobs(Token(token_id, 0, float(row[token_id]), likely), text_of)
    rank = int((row > row[token_id]).sum()) + 1
    shown[token_id] = Logprob(shown[token_id].logprob, rank, shown[token_id].decoded_token)
    return shown
