"""--no-speculation wherever a model is loaded, and what `--stats` says of drafts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.cpu_cases import PROMPT
from families import WIDE, make_checkpoint
from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.protocol import Job
from monotape.cli.main import main
from monotape.cli.parser import Parser
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig

Captured = pytest.CaptureFixture[str]
PROMPT_IDS = ",".join(map(str, PROMPT[:5]))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the CPU backend is asked to do."""
    asked: list[Job] = []
    start = CpuBackend.start

    def watched(backend: CpuBackend, job: Job, sequence: Any) -> Any:
        asked.append(job)
        return start(backend, job, sequence)

    monkeypatch.setattr(CpuBackend, "start", watched)
    return asked


@pytest.mark.parametrize(
    ("flags", "drafts"), [([], True), (["--no-speculation"], False), (["--speculation"], True)]
)
def test_run_asks_for_drafts_unless_told_not_to(
    checkpoint: Callable[[str], Path], capsys: Captured, jobs: list[Job], flags: list[str], drafts: bool
) -> None:
    model = [
        "--model",
        str(checkpoint("llama")),
        "--backend",
        "cpu",
        "--temperature",
        "0",
        "--max-tokens",
        "9",
    ]
    assert main(["run", "--json", "--prompt-ids", PROMPT_IDS, *model, *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [job.drafts for job in jobs] == [drafts]
    assert (answer["stats"]["drafted_tokens"], answer["stats"]["accepted_tokens"]) == (0, 0)


@pytest.mark.parametrize("command", ["serve", "deploy"])
@pytest.mark.parametrize(
    ("setting", "kept"), [("", True), ("speculation = false", False), ("speculation = true", True)]
)
def test_servers_take_the_setting_from_a_file_too(
    tmp_path: Path, command: str, setting: str, kept: bool
) -> None:
    from monotape.cli import deploy, serve

    add = {"serve": serve.add_arguments, "deploy": deploy.add_arguments}[command]
    file = tmp_path / "serve.toml"
    file.write_text(setting)
    for flags, expected in (([], kept), (["--no-speculation"], False)):
        parser = Parser(prog="monotape", allow_abbrev=False)
        add(parser)
        arguments = ["--config", str(file), *flags]
        options = parser.parse_args(arguments)
        options.arguments = arguments
        options = serve.with_file(options, f"monotape {command}", add)
        _, engine = serve.configurations(options)
        assert engine.speculation is expected


def test_serve_hands_it_to_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineConfig] = []

    def serve(config: ServerConfig, engine: EngineConfig) -> int:
        started.append(engine)
        return 0

    monkeypatch.setattr("monotape.server.run.serve", serve)
    assert main(["serve"]) == 0 and main(["serve", "--no-speculation"]) == 0
    assert [engine.speculation for engine in started] == [True, False]
    assert started[1] == dataclasses.replace(started[0], speculation=False)


def test_inspect_shows_the_kernels_that_run(tmp_path: Path, capsys: Captured) -> None:
    folder = make_checkpoint(WIDE, tmp_path, "bfloat16")
    arguments = ["inspect", str(folder), "--backend", "cuda", "--workers", "9", "--json"]
    told = []
    for flags in ([], ["--no-speculation"]):
        assert main([*arguments, *flags]) == 0
        told.append(json.loads(capsys.readouterr().out))
    both, alone = told
    assert both["plan"] == alone["plan"] and alone["plan"]["ranks"][0]["rows_a_pass"] == 1
    assert both["drafts"]["rows_a_pass"] > 1 and "drafts" not in alone
    assert both["memory"]["exchange"] > alone["memory"]["exchange"]


def test_a_server_elsewhere_has_a_setting_of_its_own(capsys: Captured) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--no-speculation"]) == 2
    assert "--no-speculation does nothing with --url" in capsys.readouterr().err
