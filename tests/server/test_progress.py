"""How far a prompt has been read: each prompt of a request by its own time."""

from __future__ import annotations

import pytest

from monotape.backends.token_ids import TokenIds
from monotape.engine.sampling_params import SamplingParams
from monotape.server.apis import progress
from monotape.server.apis.progress import Reading
from monotape.server.service.clock import Clock
from monotape.server.service.service import Work


def test_the_time_of_a_second_prompt_leaves_out_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 1000
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: now_ms * 10**6)
    clock, told = Clock(), []
    for prompt in range(2):
        reading = Reading(Work(TokenIds.of(range(300)), SamplingParams(), None, clock))
        clock.started(now_ms * 10**6)
        for read, after_ms in ((7, 0), (128, 400), (256, 300 + prompt)):
            now_ms += after_ms
            told.append(reading.step(read)["time_ms"])
        now_ms += 60_000  # the answer
    assert told == [0, 400, 700, 0, 400, 701]
