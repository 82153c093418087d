"""What cannot be deployed: one sentence, a hint, and an end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.running import deploy, deploy_two, replicas, run, wait_for_replicas
from monotape.cli.main import main
from monotape.cluster.config import DeployConfig
from monotape.engine.config import EngineConfig
from monotape.errors import BackendUnavailable
from monotape.server.config import ServerConfig
from processes import need_proc
from server.running import ROOT, RunningServer
from waiting import PATIENCE_S


def in_process(*flags: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """`monotape deploy` in a process of its own, because Ray starts processes and keeps state."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))}
    program = (
        f"{code}\nimport sys\nfrom monotape.cli.main import main\nsys.exit(main(['deploy', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", program, *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that are ours: a sentence and its hint."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith(("monotape:", "  hint:"))]


def test_without_ray() -> None:
    done = in_process("smollm2", code="import sys; sys.modules['ray'] = None")
    assert told(done) == [
        "monotape: Replicas need the package 'ray'.", "  hint: pip install 'monotape[cluster]'"
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, of its own packages
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--replicas", "0"], "--replicas is 0."),
        (["--replicas", "two"], "--replicas: 'two' is not a whole number."),
        (["--replicas", "4", "--max-replicas", "2"], "--max-replicas is 2."),
        (["--gpus-per-replica", "-1"], "--gpus-per-replica is -1."),
        (["--host", "0.0.0.0"], "Listening on 0.0.0.0 would let anybody on the network use this server."),
        (["--max-connections", "99"], "--max-connections cannot be set here: Ray's proxies listen."),
        (["--address", "ray://x:1"], "'ray://x:1' is not the address of a Ray cluster."),
        (["--address", "127.0.0.1:1"], "The Ray cluster at 127.0.0.1:1 does not answer: "),
    ],
)
def test_settings_that_cannot_be(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "smollm2", *flags]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"monotape: {sentence}")
    assert said[1].startswith("  hint: ")
    assert len(said) == 2


@pytest.mark.slow
def test_more_gpus_than_there_are(small: RunningServer) -> None:
    done = run(small, deploy("smollm2", "--replicas", "3", "--gpus-per-replica", "40"), code=2)
    assert told(done)[0].startswith("monotape: 3 replicas with 40 GPUs each need 120, and there are ")


def test_proxies_that_do_not_start(tmp_path: Path) -> None:
    """Ray kills a proxy that takes too long, as on a machine that is very busy."""
    code = """
from ray import serve
from ray.exceptions import RayActorError
def start(**_):
    raise RayActorError(error_msg="The actor was killed.\\nclass_name: ProxyActor")
serve.start = start
"""
    (tmp_path / "config.json").write_text("{}")
    sentence, hint = told(in_process(str(tmp_path), "--port", "0", "--backend", "cpu", code=code))
    assert sentence == "monotape: Ray Serve could not start its proxies: The actor was killed."
    assert "busy" in hint


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, of its own packages
def test_a_first_model_that_does_not_load_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray reports is that of the real failure below. Nothing was there before, so nothing is restored."""
    from ray import serve

    from monotape.cluster import deploying
    from monotape.cluster.application import Settings

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("Deploying failed.\nmonotape.errors.BackendUnavailable: config.json is empty.\n")

    deleted: list[str] = []
    monkeypatch.setattr(serve, "status", lambda **_: SimpleNamespace(applications={}))
    monkeypatch.setattr(serve, "run", failing)
    monkeypatch.setattr(serve, "delete", deleted.append)
    monkeypatch.setattr(deploying, "build", lambda settings: settings)
    settings = Settings(DeployConfig(), ServerConfig(), EngineConfig(model="m"))
    with pytest.raises(BackendUnavailable, match=r"could be started: config\.json is empty\. Try the model"):
        deploying._run(settings)
    assert deleted == [deploying.NAME]


@pytest.mark.wide  # a Ray of its own, for minutes; its parts are in the test above and in the update below
def test_a_model_that_does_not_load_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = in_process(str(tmp_path), "--port", "0", "--backend", "cpu")
    assert "deployed before" not in check_model_that_does_not_load(done)


@pytest.mark.slow
def test_an_update_to_a_model_that_does_not_load_is_undone(scripted: RunningServer, tmp_path: Path) -> None:
    """All replicas are there again, not only those that Ray had not stopped for the update."""
    need_proc()
    (tmp_path / "config.json").write_text("{}")
    done = run(scripted, deploy_two(str(tmp_path)), code=2)
    assert check_model_that_does_not_load(done).endswith("What was deployed before serves again.")
    before = wait_for_replicas(scripted, 2)
    assert [scripted.say(f"say:{number}") for number in range(4)] == [str(number) for number in range(4)]
    time.sleep(2)  # twice the interval at which Ray looks after its replicas
    assert replicas(scripted) == before, "it is being tried again"


def check_model_that_does_not_load(done: subprocess.CompletedProcess[str]) -> str:
    sentence, hint = told(done)
    assert sentence.startswith("monotape: No replica could be started: ")
    assert "config.json" in sentence or "safetensors" in sentence
    assert hint == "  hint: Try the model with `monotape run` first."
    return sentence
