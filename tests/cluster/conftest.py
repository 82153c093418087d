"""The clusters that tests share, by the names that the tests of the single server use."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

import real_models
from cluster.running import real_cluster, scripted_cluster
from server.running import RunningServer


@pytest.fixture(scope="package", autouse=True)
def token() -> Iterator[None]:
    """A token of these tests' own: Ray admits to a cluster only who has the token it was started with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


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
