"""The deployments that tests share, by the names that the tests of the single server use."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import real_models
from cluster.running import Cluster, deploy_scripted, deploy_two
from server.running import RunningServer
from server.small_models import safetensors_folder

#: Deployments in the order in which they follow each other on one Ray.
DEPLOYMENTS = ("small", "smollm2", "scripted", "changing")
KEY = "a-key-of-these-tests"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one deployment follow each other: a change takes seconds."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if item.path.parent == here]

    def order(item: pytest.Item) -> tuple[int, bool]:
        names = getattr(item, "fixturenames", ())
        used = max((DEPLOYMENTS.index(name) + 1 for name in names if name in DEPLOYMENTS), default=0)
        return used, item.get_closest_marker("long") is not None

    for place, item in zip(places, sorted((items[place] for place in places), key=order), strict=True):
        items[place] = item


@pytest.fixture(scope="package", autouse=True)
def token() -> Iterator[None]:
    """A token of these tests' own: Ray admits to a cluster only who has the token it was started with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="package")
def cluster(token: None) -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.end()


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
    return cluster.use("scripted", deploy_scripted(max_queue=4))


@pytest.fixture
def changing(cluster: Cluster) -> RunningServer:
    """Scripted replicas of which a test knows only that they answer, because others have changed them."""
    server = cluster.current or cluster.use("scripted", deploy_scripted(max_queue=4))
    cluster.changed()
    return server
