"""`monotape serve`: its flags are vLLM's, and what it cannot do it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from monotape.cli.main import build_parser, main
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
from server.running import scripted_server
from weights.gguf_models import write_wide_model


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, EngineConfig]]:
    """What `serve` was called with."""
    calls: list[tuple[ServerConfig, EngineConfig]] = []

    def serve(config: ServerConfig, engine: EngineConfig) -> int:
        calls.append((config, engine))
        return 0

    monkeypatch.setattr("monotape.server.run.serve", serve)
    return calls


def test_the_flags_of_vllm_are_taken(started: list[tuple[ServerConfig, EngineConfig]]) -> None:
    command = (
        "serve some/model --host 127.0.0.1 --port 8123 --served-model-name a,b --max-model-len 777 --api-key k "
        "--dtype bf16 --kv-cache-dtype auto --seed 5 --chat-template {{x}} --tool-call-parser mistral "
        "--reasoning-parser qwen3 --enable-auto-tool-choice --enable-prefix-caching --stream-interval 3 "
        "--gpu-memory-utilization 0.9 --tensor-parallel-size 1 --max-num-seqs 1 --max-queue 9"
    )
    assert main(command.split()) == 0
    ((server, engine),) = started
    assert (server.port, server.served_model_name, server.api_key, server.stream_interval) == (
        8123,
        ("a", "b"),
        "k",
        3,
    )
    assert (server.tool_call_parser, server.reasoning_parser, server.max_queue) == ("mistral", "qwen3", 9)
    assert (engine.model, engine.max_model_len, engine.dtype, engine.seed) == ("some/model", 777, "bf16", 5)
    assert engine.chat_template == "{{x}}" and engine.progress is False


@pytest.mark.parametrize(
    "arguments",
    [["some/model"], ["--model", "some/model"], ["-m", "some/model"], ["some/model", "-m", "some/model"]],
)
def test_a_model_may_be_named_with_a_flag(
    started: list[tuple[ServerConfig, EngineConfig]], arguments: list[str]
) -> None:
    """As run and chat take it; serve answered that it does not understand --model."""
    assert main(["serve", *arguments]) == 0
    assert started[0][1].model == "some/model"


def test_two_models_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "some/model", "--model", "other/model"]) == 2
    assert "Two models are asked for: some/model and other/model" in capsys.readouterr().err


def test_the_key_may_come_from_the_environment(
    started: list[tuple[ServerConfig, EngineConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not show in the list of processes, as arguments do."""
    monkeypatch.setenv("MONOTAPE_API_KEY", "hidden")
    assert main(["serve", "--host", "0.0.0.0"]) == 0
    assert main(["serve", "--api-key", "shown"]) == 0
    monkeypatch.setenv("MONOTAPE_API_KEY", "")
    assert main(["serve"]) == 0
    assert [server.api_key for server, _ in started] == ["hidden", "shown", None]


def test_defaults_are_those_of_the_configurations(started: list[tuple[ServerConfig, EngineConfig]]) -> None:
    assert main(["serve", "--quantization", "q8"]) == 0
    ((server, engine),) = started
    assert server == ServerConfig() and server.port == 8000
    assert engine == EngineConfig(dtype="q8", max_sequences=64, progress=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--tensor-parallel-size", "2"],
            "--tensor-parallel-size 2 is not supported: ranks are asked for with --tp",
        ),
        (["--max-num-seqs", "256"], "one request at a time has the whole memory bandwidth"),
        (["--data-parallel-size", "2"], "start one server a device instead"),
        (["--quantization", "awq"], "--quantization awq is not supported"),
        (["--quantization", "q8", "--dtype", "f32"], "contradict each other"),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype int4 is not supported"),
        (["--kv-cache-dtype", "fp8", "--kv-dtype", "f16"], "contradict each other"),
        (["--speculative-config", '{"method": "ngram"}'], "--no-speculation turns that off"),
        (["--speculative-config", "{"], "'{' is not JSON"),
        (["--no-enable-prefix-caching"], "Prefix caching cannot be switched off"),
        (["--host", "0.0.0.0"], "would let anybody on the network use this server"),
        (["--port", "99999"], "port is 99999"),
        (["--enable-lora"], "does not understand '--enable-lora'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and "hint: " in error


def test_files_that_are_no_model_are_refused_before_there_is_a_server(
    capsys: pytest.CaptureFixture[str],
    started: list[tuple[ServerConfig, EngineConfig]],
    tmp_path: Path,
) -> None:
    """A server began to listen, and then blamed the tokenizer."""
    model = write_wide_model(tmp_path / "model.gguf", {})
    model.write_bytes(model.read_bytes()[:-100])
    assert main(["run", "hello", "--model", str(model)]) == 2
    as_run_says = capsys.readouterr().err
    assert main(["serve", str(model)]) == 2
    assert capsys.readouterr().err == as_run_says
    assert "truncated" in as_run_says and not started


def test_a_model_that_does_not_run_here_is_refused_before_there_is_a_server(
    capsys: pytest.CaptureFixture[str],
    started: list[tuple[ServerConfig, EngineConfig]],
    tmp_path: Path,
) -> None:
    model = write_wide_model(tmp_path / "model.gguf", {}, architecture="mamba")
    assert main(["serve", str(model)]) == 2
    error = capsys.readouterr().err
    assert "mamba" in error and "hint: " in error and not started


def test_every_setting_of_the_server_has_a_flag() -> None:
    _, commands = build_parser()
    text = commands["serve"].format_help()
    for name in ServerConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


def test_a_port_in_use_and_missing_certificates_are_explained() -> None:
    from monotape.errors import ResourceError, UsageError
    from monotape.server.http.limits import Limits
    from monotape.server.run import listen, make_server

    with (
        listen(ServerConfig(port=0)) as taken,
        pytest.raises(ResourceError, match=r"cannot be had: Address already in use\. "),
    ):
        listen(ServerConfig(port=taken.getsockname()[1]))

    async def app(*_: Any) -> None: ...

    with pytest.raises(UsageError, match="The TLS key or certificate cannot be read"):
        make_server(app, ServerConfig(ssl_keyfile="no.key", ssl_certfile="no.crt"), asyncio.Event(), Limits())


def test_health_is_503_until_the_model_has_made_a_token() -> None:
    with scripted_server(engine={"model": "slow"}) as server:
        loading = server.get("/health")
        assert loading.status_code == 503 and loading.headers["retry-after"] == "1"
        assert loading.json()["error"]["message"] == "The engine is loading. Try again in a moment."
        assert (
            server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).status_code
            == 503
        )
        assert server.get("/v1/models").status_code == 200  # the model is known before the server can answer
        assert server.wait().get("/health").status_code == 200
