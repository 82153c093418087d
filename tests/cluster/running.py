"""Clusters for tests: real Ray, two replicas with a core each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from processes import descendants
from server.running import ROOT, RunningServer, environment, process


@contextlib.contextmanager
def scripted_cluster(**settings: Any) -> Iterator[RunningServer]:
    """Replicas whose model is scripted.py's. `engine` and `plan` hold further settings."""
    with process(_launch(port=0, **settings), "scripted") as server:
        yield server


def update(server: RunningServer, **settings: Any) -> None:
    """Deploys to a cluster that runs, as a second command would."""
    address = next(line.split()[2] for line in server.lines if line.startswith("Ray at"))
    plan = {"address": address, **settings.pop("plan", {})}
    command = _launch(plan=plan, port=int(server.url.rpartition(":")[2]), **settings)
    subprocess.run(command, check=True, env=environment(), cwd=ROOT, timeout=180)


def _launch(source: str = "server.scripted", **settings: Any) -> list[str]:
    engine = {"model": "scripted", **settings.pop("engine", {})}
    plan = {"replicas": 2, "cpus_per_replica": 1, **settings.pop("plan", {})}
    return [sys.executable, "-m", "cluster.launch", source, *map(json.dumps, (plan, settings, engine))]


def replicas(server: RunningServer) -> list[int]:
    """The processes of the replicas."""
    found = descendants(server.process.pid).items()
    return sorted(pid for pid, command in found if command.startswith("ray::ServeReplica:monotape:replicas"))


def wait_for_replicas(server: RunningServer, count: int, without: Iterable[int] = ()) -> list[int]:
    deadline = time.monotonic() + 90
    while len(found := replicas(server)) != count or set(found) & set(without):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def real_cluster(model: str, *flags: str, replicas: int = 2) -> Iterator[RunningServer]:
    """`monotape deploy` itself."""
    command = [
        sys.executable,
        "-m",
        "monotape",
        "deploy",
        model,
        "--port",
        "0",
        "--replicas",
        str(replicas),
        *flags,
    ]
    with process(command, model) as server:
        yield server
