"""`monotape serve --config FILE`: every setting, checked; what a flag says wins."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from monotape.cli.main import build_parser, main
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig

Captured = pytest.CaptureFixture[str]
Started = list[tuple[ServerConfig, EngineConfig]]
DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What `serve` was called with."""
    calls: Started = []

    def serve(config: ServerConfig, engine: EngineConfig) -> int:
        calls.append((config, engine))
        return 0

    monkeypatch.setattr("monotape.server.run.serve", serve)
    monkeypatch.delenv("MONOTAPE_API_KEY", raising=False)
    return calls


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> str:
        path = tmp_path / "serve.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o600)
        return str(path)

    return write


def test_a_file_says_what_flags_say(started: Started, write: Any) -> None:
    path = write(
        """
model = "org/name"
host = "::1"
port = 8123
served-model-name = ["a", "b"]   # dashes as in flags
max_queue = 9                    # or underscores
trust-request-chat-template = true
dtype = "q8"
max-model-len = 777
gpu-memory-utilization = 0.5
log-level = "warning"
"""
    )
    assert main(["serve", "--config", path]) == 0
    ((server, engine),) = started
    assert (server.host, server.port, server.served_model_name, server.max_queue) == (
        "::1",
        8123,
        ("a", "b"),
        9,
    )
    assert server.trust_request_chat_template is True
    assert (engine.model, engine.dtype, engine.max_model_len) == ("org/name", "q8", 777)


def test_flags_win_wherever_they_stand(started: Started, write: Any) -> None:
    path = write('model = "org/name"\nport = 8123\nmax-queue = 9\nserved-model-name = "a,b"')
    for arguments in (
        ["--port", "9000", "--model", "other/one", "--config", path],
        ["--config", path, "other/one", "--port=9000"],
    ):
        assert main(["serve", *arguments]) == 0
    for server, engine in started:
        assert (server.port, server.max_queue, server.served_model_name) == (9000, 9, ("a", "b"))
        assert engine.model == "other/one"


def test_every_setting_of_serve_may_be_in_a_file(started: Started, write: Any) -> None:
    _, commands = build_parser(["serve"])
    settings = {name: action for name, action in commands["serve"].settings.items() if name != "config"}
    assert {*ServerConfig.__dataclass_fields__, "model", "dtype", "workers", "tp", "kv_bytes"} <= set(
        settings
    )
    lines = []
    for name, action in settings.items():
        value = action.default
        if name not in ("positional_model", "speculative_config") and value not in (None, ()):
            shown = str(value).lower() if isinstance(value, bool | int) else f'"{value}"'
            lines.append(f"{name} = {shown}")
    assert len(lines) > 15
    assert main(["serve", "--config", write("\n".join(lines))]) == 0
    assert main(["serve"]) == 0
    assert started[0] == started[1]


@pytest.mark.parametrize(
    ("text", "said", "hinted"),
    [
        ("prot = 8000", "sets 'prot', which is no setting", "Did you mean 'port'?"),
        ("max-modl-len = 5", "'max-modl-len'", "Did you mean 'max-model-len'?"),
        ("[server]\nport = 5", "sets 'server'", "without a [section]"),
        ("zzz = 1", "'zzz'", "monotape serve --help"),
        ("config = 'other.toml'", "'config', which is no setting", ""),
        ("port = '8000'", "port: '8000' is not a whole number", "whole number"),
        ("port = true", "port: true is not a whole number", "whole number"),
        ("port = 99999", "--port is 99999", "0 to 65535"),
        ("model = 5", "model: 5 is not text in quotes", "quotes"),
        ("served-model-name = [1]", "served-model-name: [1] is not text, or a list of texts", "list"),
        ("emulate-ranks = 1", "emulate-ranks: 1 is not true or false", "true or false"),
        ("gpu-memory-utilization = inf", "is not a number", "number"),
        ("uvicorn-log-level = 'loud'", "'loud' is not one of debug", "debug"),
        ("max-queue = 1\nmax_queue = 2", "max_queue twice, in two spellings", "Remove one"),
        ("log-level = 'info'\nuvicorn-log-level = 'info'", "twice", "Remove one"),
        ("no-enable-prefix-caching = true", "is no setting", "enable-prefix-caching"),
        ("enable-prefix-caching = false", "cannot be switched off", "Leave out"),
        ("max-num-seqs = 4", "--max-num-seqs 4 is not supported", "Leave it out"),
        ("port 8000", "is not TOML", "port = 8000"),
        (b"port = \xff", "is not UTF-8 text (byte 7)", "UTF-8"),
    ],
)
def test_what_cannot_be_is_refused(
    write: Any, capsys: Captured, text: str | bytes, said: str, hinted: str, started: Started
) -> None:
    assert main(["serve", "--config", write(text)]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert said in message and hinted in hint
    assert not started


def test_a_file_that_is_not_there(capsys: Captured, tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        assert main(["serve", "--config", str(path)]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_a_key_in_the_file_is_older_than_one_in_the_environment(
    started: Started, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    path = write("api-key = 'of the file'")
    assert main(["serve", "--config", path]) == 0
    monkeypatch.setenv("MONOTAPE_API_KEY", "of the environment")
    assert main(["serve", "--config", path]) == 0
    assert main(["serve", "--config", path, "--api-key", "given"]) == 0
    assert [server.api_key for server, _ in started] == ["of the file", "of the environment", "given"]
    assert capsys.readouterr().err == ""
    os.chmod(path, 0o644)
    assert main(["serve", "--config", path]) == 0
    assert "other users may read it" in capsys.readouterr().err


def test_the_example_of_the_documentation_is_served(started: Started, write: Any) -> None:
    text = DOCUMENT.read_text("utf-8")
    example = text[text.index("```toml\n") :].removeprefix("```toml\n").partition("```")[0]
    assert len(tomllib.loads(example)) >= 4
    assert main(["serve", "--config", write(example)]) == 0
    ((server, _),) = started
    assert server.port == tomllib.loads(example)["port"]
