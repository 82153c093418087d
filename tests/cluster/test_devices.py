"""What each replica gets of the GPUs and cores that Ray has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from monotape.cluster.config import DeployConfig
from monotape.engine.config import EngineConfig
from monotape.errors import ResourceError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, of its own packages


@dataclass(frozen=True)
class Share:
    """Of one replica."""

    gpus: int
    cpus: int
    tp: int | None
    workers: int | None


def share(
    monkeypatch: pytest.MonkeyPatch, here: dict[str, float], plan: dict[str, Any], engine: dict[str, Any]
) -> Share:
    from monotape.cluster import deploying
    from monotape.cluster.application import with_devices

    monkeypatch.setattr("ray.cluster_resources", lambda: here)
    asked = EngineConfig(model="m", **engine)
    found = deploying.resolved(DeployConfig(**plan), asked)
    given = with_devices(asked, found)
    assert found.gpus_per_replica is not None and found.cpus_per_replica is not None
    return Share(found.gpus_per_replica, found.cpus_per_replica, given.tp, given.workers)


EIGHT = {"GPU": 8.0, "CPU": 64.0}
CORES = {"CPU": 16.0}


@pytest.mark.parametrize(
    ("here", "plan", "engine", "expected"),
    [
        (EIGHT, {"replicas": 8}, {}, Share(1, 1, None, None)),
        (EIGHT, {"replicas": 2, "gpus_per_replica": 4}, {}, Share(4, 1, 4, None)),
        (EIGHT, {"replicas": 4}, {"tp": 2}, Share(2, 1, 2, None)),
        (EIGHT, {"replicas": 4}, {"backend": "cpu"}, Share(0, 16, None, 16)),
        (EIGHT, {"replicas": 4, "gpus_per_replica": 0}, {}, Share(0, 16, None, 16)),
        (CORES, {"replicas": 2}, {}, Share(0, 8, None, 8)),
        (CORES, {"replicas": 2, "max_replicas": 4}, {}, Share(0, 4, None, 4)),
        (CORES, {"replicas": 2, "cpus_per_replica": 3}, {"workers": 2}, Share(0, 3, None, 2)),
    ],
)
def test_what_a_replica_gets(
    monkeypatch: pytest.MonkeyPatch,
    here: dict[str, float],
    plan: dict[str, Any],
    engine: dict[str, Any],
    expected: Share,
) -> None:
    assert share(monkeypatch, here, plan, engine) == expected


@pytest.mark.parametrize(
    ("plan", "engine", "sentence"),
    [
        ({"replicas": 9}, {}, "9 replicas with 1 GPUs each need 9, and there are 8."),
        ({"replicas": 3, "gpus_per_replica": 4}, {}, "3 replicas with 4 GPUs each need 12, and there are 8."),
        ({"replicas": 3}, {"tp": 4}, "3 replicas with 4 GPUs each need 12, and there are 8."),
        ({"cpus_per_replica": 65}, {}, "1 replicas with 65 cores each need 65, and there are 64."),
    ],
)
def test_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], engine: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ResourceError) as refused:
        share(monkeypatch, EIGHT, plan, engine)
    assert str(refused.value).startswith(sentence)
