"""Clusters for tests: real Ray, two replicas with a core each."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from server.running import RunningServer, process


@contextlib.contextmanager
def scripted_cluster(
    replicas: int = 2, source: str = "server.scripted", **settings: Any
) -> Iterator[RunningServer]:
    """Replicas whose model is scripted.py's. `engine` and `plan` hold further settings."""
    engine = settings.pop("engine", {"model": "scripted"})
    plan = {"replicas": replicas, "cpus_per_replica": 1, **settings.pop("plan", {})}
    parts = [json.dumps(part) for part in (plan, {"port": 0, **settings}, engine)]
    with process([sys.executable, "-m", "cluster.launch", source, *parts], engine["model"]) as server:
        yield server


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
