"""Tokens that the kernel draws on the host machine, and what the reference sampler says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import ids
from backends.host_kernel import HostKernel, Schedule
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.protocol import Job, Token
from monotape.backends.reference.sampler import choose, logprobs

Logits = NDArray[np.float32]


def drawn_in_any_order(
    backend: Any, job: Job, schedules: Sequence[Schedule]
) -> Iterator[tuple[list[Token], Logits]]:
    """Tokens by every schedule, which are those of the reference, and the logits that they were drawn from."""
    for schedule in schedules:
        HostKernel.schedule = schedule
        tokens = list(CudaGeneration(backend, job, backend.new_sequence(), chunk=0))
        told = (*job.prompt, *ids(tokens)[:-1])
        logits = backend.logits(told, backend.new_sequence(), chunk=0)[len(job.prompt) - 1 :]
        for step, token in enumerate(tokens):
            output, banned = ids(tokens)[:step], job.stop_ids if step < job.min_tokens else ()
            position = len(job.prompt) + step
            assert token.id == choose(logits[step], job.prompt, output, position, job.sampling, banned)
        yield tokens, logits


def check_sampling_in_any_order(backend: Any, job: Job, schedules: Sequence[Schedule]) -> None:
    """What is drawn, its log-probabilities, and where it ends."""
    assert job.logprobs is not None
    for tokens, logits in drawn_in_any_order(backend, job, schedules):
        for step, token in enumerate(tokens):
            value, top = logprobs(logits[step], token.id, job.logprobs)
            assert token.logprob == pytest.approx(value, rel=1e-6)
            assert [best for best, _ in token.top_logprobs] == [best for best, _ in top]
            assert [v for _, v in token.top_logprobs] == pytest.approx([v for _, v in top], rel=1e-6)
        assert len(tokens) == job.max_tokens or tokens[-1].id in job.stop_ids
