"""The clusters that tests share, by the names that the tests of the single server use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import real_models
from cluster.running import real_cluster, scripted_cluster
from server.running import RunningServer


@pytest.fixture(scope="package")
def scripted() -> Iterator[RunningServer]:
    """Two replicas that do what their prompts say."""
    with scripted_cluster(max_queue=4) as server:
        server.wait().say("say:first")
        yield server


@pytest.fixture(scope="package")
def smollm2() -> Iterator[RunningServer]:
    """`monotape deploy` with two replicas of SmolLM2, a core each."""
    flags = ("--served-model-name", "test/smollm2", "--backend", "cpu", "--cpus-per-replica", "1")
    with real_cluster(str(real_models.smollm2()), *flags) as server:
        yield server.wait()
