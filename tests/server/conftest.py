"""The servers that most tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import real_models
from server.running import RunningServer, real_server, scripted_server


@pytest.fixture(scope="session")
def scripted() -> Iterator[RunningServer]:
    """Does what its prompts say."""
    with scripted_server(max_queue=4) as server:
        server.wait().say("say:first")  # a counter with labels shows only when something was counted
        yield server


@pytest.fixture(scope="session")
def smollm2() -> Iterator[RunningServer]:
    """`monotape serve` with SmolLM2 on the CPU."""
    path = real_models.smollm2()
    with real_server(str(path), "--served-model-name", "test/smollm2", "--backend", "cpu") as server:
        yield server.wait()
