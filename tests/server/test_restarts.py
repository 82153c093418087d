"""An engine that cannot be loaded again: causes that can pass are waited for, others end the server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from families import CASES, make_checkpoint
from monotape.server.engine import wire
from monotape.server.engine.restarts import Restarts
from processes import children, need_proc
from server.running import RunningServer, real_server, scripted_server
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

AWAY = wire.LoadFailed("The file is away.", "Put it back.", lasting=False)
OTHER = wire.LoadFailed("It is another model.", "Restart.", lasting=True)


def kill_engine(server: RunningServer) -> None:
    need_proc()
    found = children(server.process.pid).items()
    os.kill(next(pid for pid, command in found if "server.engine.process" in command), signal.SIGKILL)


def test_pauses_grow_for_causes_that_can_pass() -> None:
    restarts = Restarts()
    assert restarts.after(True, None, -9) == 0
    assert [restarts.after(False, AWAY, 2) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert restarts.after(True, None, -11) == 0
    assert restarts.after(False, AWAY, 2) == 1  # from the beginning
    assert [restarts.after(False, None, -signal.SIGKILL) for _ in range(4)] == [2, 4, 8, 16]


def test_causes_that_cannot_pass_end_it() -> None:
    assert Restarts().after(False, AWAY, 2) == "The file is away. Put it back."  # it has never been there
    loaded = Restarts()
    loaded.after(True, None, -9)
    assert loaded.after(False, OTHER, 2) == "It is another model. Restart."
    crashing = Restarts()
    assert [crashing.after(False, None, -11) for _ in range(2)] == [1, 2]
    assert crashing.after(False, None, -11) == "The engine process died 3 times while loading (of SIGSEGV)."
    killed = Restarts()  # never loaded: there may never be enough memory
    assert [killed.after(False, None, -9) for _ in range(2)] == [1, 2]
    assert killed.after(False, None, -9) == "The engine process died 3 times while loading (of SIGKILL)."


def test_causes_that_pass_are_waited_for(tmp_path: Path) -> None:
    """One server after every one of them: it begins anew each time that its engine was there."""
    gate = tmp_path / "gate"
    with scripted_server(engine={"model": str(gate)}) as server:
        server.wait()
        for why in ("away", "full", "memory", "disk", "killed"):
            wait_out(server, gate, why)


def wait_out(server: RunningServer, gate: Path, why: str) -> None:
    """The engine cannot be loaded again for this reason, as long as the gate is there."""
    before = server.metric("monotape_engine_restarts")
    gate.write_text(why)
    kill_engine(server)
    until(lambda: server.metric("monotape_engine_restarts") >= before + 3)  # two tries have failed
    health = server.get("/health")
    assert health.status_code == 503 and health.json()["error"]["code"] == "engine_unavailable"
    assert int(health.headers["retry-after"]) >= 1
    assert str(gate.parent) not in health.text
    gate.unlink()
    until(lambda: server.get("/health").status_code == 200)
    assert server.say("say:back") == "back"
    assert server.process.poll() is None


@pytest.mark.parametrize(
    ("why", "sentence"),
    [
        ("other", "monotape: config.json describes another model. Restart the server."),
        ("crash", "monotape: The engine process died 3 times while loading (exit code 139)."),
    ],
)
def test_a_cause_that_lasts_ends_the_server(tmp_path: Path, why: str, sentence: str) -> None:
    gate = tmp_path / "gate"
    with scripted_server(engine={"model": str(gate)}) as server:
        server.wait()
        gate.write_text(why)
        kill_engine(server)
        assert server.process.wait(PATIENCE_S) == 1
        server.end()
        assert server.lines[-1] == sentence


def test_a_model_whose_folder_was_away_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing, under a relative path that could be a name on the hub."""
    folder = make_checkpoint(CASES[0], tmp_path / "org" / "model")
    monkeypatch.setattr("server.running.ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(os.sys.path))  # type: ignore[attr-defined]
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
    with real_server("org/model", "--backend", "cpu") as server:
        before = server.wait().post("/v1/completions", body).json()["choices"]
        folder.rename(tmp_path / "elsewhere")
        kill_engine(server)
        until(lambda: server.metric("monotape_engine_restarts") >= 2)
        assert server.get("/health").status_code == 503
        (tmp_path / "elsewhere").rename(folder)
        until(lambda: server.get("/health").status_code == 200)
        assert server.post("/v1/completions", body).json()["choices"] == before
