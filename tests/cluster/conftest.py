"""The deployments that tests share, by the names that the tests of the single server use."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import real_models
from cluster.running import SCRIPTED, Cluster, deploy_two
from server.running import RunningServer
from server.small_models import safetensors_folder

#: Deployments in the order in which they follow each other on one Ray.
DEPLOYMENTS = ("small", "smollm2", "scripted", "changing")
KEY = "a-key-of-these-tests"
#: The one cluster of these tests, while it runs.
RUNNING: list[Cluster] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one deployment follow each other, because a change takes seconds.

    Of the single server's tests those are left out that ask no server of these fixtures: they would run the same
    code a second time.
    """
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    left_out = [item for item in here if _is_of_single_server(item) and not _deployment(item)]
    config.hook.pytest_deselected(items=left_out)
    ordered = iter(sorted((item for item in here if item not in left_out), key=_deployment))
    items[:] = [next(ordered) if item in here else item for item in items if item not in left_out]


def _is_of_single_server(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.function.__module__.startswith("server.")


def _deployment(item: pytest.Item) -> int:
    """The place of a test's deployment in the order; 0 if it has none."""
    names = getattr(item, "fixturenames", ())
    return max((DEPLOYMENTS.index(name) + 1 for name in names if name in DEPLOYMENTS), default=0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends Ray after the last of these tests: it takes a share of a core even when idle.

    Fixtures of this folder would keep it until the process ends, because a folder without __init__.py is no package.
    """
    if RUNNING and (nextitem is None or nextitem.path.parent != Path(__file__).parent):
        RUNNING.pop().end()


@pytest.fixture(scope="package", autouse=True)
def token() -> Iterator[None]:
    """A token of these tests' own: Ray admits to a cluster only who has the token it was started with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray's processes would give way to all others, and those of the other tests leave no core idle.
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture
def cluster(token: None) -> Cluster:
    """The one that runs."""
    if not RUNNING:
        RUNNING.append(Cluster())
    return RUNNING[0]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return safetensors_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def small(cluster: Cluster, folder: Path) -> RunningServer:
    """A small model with random weights, behind a key. Each replica keeps half of forty conversations, and some."""
    flags = ("--max-sequences", "32", "--served-model-name", "small", "--api-key", KEY)
    return cluster.use("small", deploy_two(str(folder), *flags))


@pytest.fixture
def smollm2(cluster: Cluster) -> RunningServer:
    """A real model."""
    return cluster.use(
        "smollm2", deploy_two(str(real_models.smollm2()), "--served-model-name", "test/smollm2")
    )


@pytest.fixture
def scripted(cluster: Cluster) -> RunningServer:
    """Replicas that do what their prompts say."""
    return cluster.use("scripted", SCRIPTED)


@pytest.fixture
def changing(cluster: Cluster) -> RunningServer:
    """Scripted replicas of which a test knows only that they answer, because others have changed them."""
    server = cluster.current or cluster.use("scripted", SCRIPTED)
    cluster.changed()
    return server
