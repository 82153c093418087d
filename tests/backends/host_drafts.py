"""Requests with drafts, and what their answers are compared in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.protocol import FinishReason, Job, Sampling, Token

SAMPLINGS: dict[str, dict[str, Any]] = {  # further fields of a job
    "greedy": {},
    "drawn": {"sampling": Sampling(temperature=1.1, seed=5)},
    "filtered": {"sampling": Sampling(temperature=0.8, top_k=20, seed=6), "logprobs": 3},
    "all probabilities": {"logprobs": 2},
    "penalties": {
        "sampling": Sampling(
            temperature=0.7, seed=7, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
        ),
        "logprobs": 0,
    },
    "biases": {
        "sampling": Sampling(temperature=0.9, seed=8, logit_bias=((4, 2.0), (17, -1.0), (4, 0.5))),
        "stop_ids": (2, 4, 9),
        "min_tokens": 20,
    },
}  # fmt: skip
Choice = tuple[int, float | None, tuple[tuple[int, float], ...]]  # all of a token but its time


@dataclass(frozen=True, slots=True)
class Answer:
    """What must not depend on drafts, and what is known of them."""

    choices: tuple[Choice, ...]
    finish_reason: FinishReason | None
    drafted: int
    accepted: int

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for token, _, _ in self.choices)

    @property
    def told(self) -> tuple[tuple[Choice, ...], FinishReason | None]:
        return self.choices, self.finish_reason


def choices_of(tokens: Sequence[Token]) -> tuple[Choice, ...]:
    return tuple((token.id, token.logprob, token.top_logprobs) for token in tokens)


def answer(backend: Any, job: Job, sequence: Any = None, *, chunk: int | None = None) -> Answer:
    generation = CudaGeneration(
        backend, job, backend.new_sequence() if sequence is None else sequence, chunk=chunk
    )
    tokens = list(generation)
    launch = generation._launch
    return Answer(choices_of(tokens), launch.finish_reason, launch.drafted, launch.accepted)


def predicting(job: Job, output: Sequence[int], wrong: float, vocab: int) -> Job:
    """The job with a prediction: what will come, but for a share of its tokens, after the end of the prompt."""
    dice = random.Random(round(1000 * wrong))
    predicted = [(token + 1) % vocab if dice.random() < wrong else token for token in output]
    return replace(job, prediction=(*job.prompt[-2:], *predicted))


def plain(job: Job) -> Job:
    return replace(job, drafts=False)
