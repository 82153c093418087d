"""One Ray for all tests of this folder, and one deployment after another on it: two replicas with a core each."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from processes import descendants
from server.running import ROOT, RunningServer, environment, process
from waiting import PATIENCE_S, until


class Deployment(RunningServer):
    """What a command has deployed to the Ray of another command."""

    def __init__(self, owner: RunningServer, lines: list[str]) -> None:
        self.process, self.url, self.lines = owner.process, owner.url, lines


class Cluster:
    """The first command starts Ray; the others update what runs there, as users do it."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._owner: RunningServer | None = None
        self._current: tuple[str, RunningServer] | None = None

    def use(self, name: str, command: list[str]) -> RunningServer:
        """The deployment of a command, which runs unless it was the last one."""
        if self._current is not None and self._current[0] == name:
            return self._current[1]
        if self._owner is None:
            self._owner = self._stack.enter_context(process([*command, "--port", "0"], name)).wait()
            server = self._owner
        else:
            server = Deployment(self._owner, run(self._owner, command).stderr.splitlines())
        self._current = (name, server)
        return server

    def changed(self) -> None:
        """A test has deployed scripted replicas with settings of its own."""
        assert self._current is not None
        self._current = ("changed", self._current[1])

    @property
    def current(self) -> RunningServer | None:
        return None if self._current is None else self._current[1]

    def end(self) -> None:
        self._stack.close()


def run(server: RunningServer, command: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command that deploys to the Ray of another one, and ends."""
    command = [*command, "--address", ray_address(server)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stderr
    return done


def ray_address(server: RunningServer) -> str:
    found = re.search(r"Ray is at (\S+)", "\n".join(server.lines))
    assert found is not None, server.lines
    return found.group(1)


def deploy(model: str, *flags: str) -> list[str]:
    """`monotape deploy` itself."""
    return [sys.executable, "-m", "monotape", "deploy", model, *flags]


def deploy_two(model: str, *flags: str) -> list[str]:
    return deploy(model, "--backend", "cpu", "--replicas", "2", "--cpus-per-replica", "1", *flags)


def deploy_scripted(**settings: Any) -> list[str]:
    """The same with replicas that do what their prompts say. `engine` and `plan` hold further settings."""
    engine = {"model": "scripted", **settings.pop("engine", {})}
    plan = {"replicas": 2, "cpus_per_replica": 1, **settings.pop("plan", {})}
    return [sys.executable, "-m", "cluster.launch", *map(json.dumps, (plan, settings, engine))]


#: Two scripted replicas, as most tests want them.
SCRIPTED = deploy_scripted(max_queue=4)


def update(server: RunningServer, **settings: Any) -> None:
    """Deploys scripted replicas with other settings."""
    run(server, deploy_scripted(**settings))


def replicas(server: RunningServer) -> list[int]:
    """The processes of the replicas."""
    return _actors(server, "ServeReplica:monotape:replicas")


def fronts(server: RunningServer) -> list[int]:
    """The processes of the front: one, and a second one while it is being replaced."""
    return _actors(server, "ServeReplica:monotape:front")


def _actors(server: RunningServer, name: str) -> list[int]:
    found = descendants(server.process.pid).items()
    return sorted(pid for pid, command in found if command.startswith(f"ray::{name}"))


def wait_for_replicas(server: RunningServer, count: int, without: Iterable[int] = ()) -> list[int]:
    """Their processes, when there are so many and none of those that are to go."""
    gone, found = set(without), list[int]()

    def there() -> bool:
        found[:] = replicas(server)
        return len(found) == count and not gone & set(found)

    until(there, lambda: f"{count} replicas without {gone} instead of {found}")
    return found
