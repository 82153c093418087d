"""`monotape connect`: what it prints is what the agents read, with the server's own model and context in it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from monotape.cli.main import main
from monotape.server.playground.agents import NO_KEY, Target, agents, as_markdown
from server.fake_openai import Script, running

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
ISSUE = ("codex", "claude-code", "aider", "opencode", "cline")


@pytest.fixture
def url() -> Iterator[str]:
    with running(Script(model="qwen2.5-coder", context=40_960)) as address:
        yield address


def printed(capsys: Captured, *arguments: str) -> str:
    assert main(["connect", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(agents()))
def test_every_agent_is_filled_in(name: str, url: str, capsys: Captured) -> None:
    out = printed(capsys, name, "--url", f"{url}/v1/")
    assert "{{" not in out
    assert url in out
    assert "qwen2.5-coder" in out
    assert f"{url}/v1/v1" not in out
    assert ("claude" in name) == (
        f"{url}/v1\n" not in out and f'{url}/v1"' not in out and f"{url}/v1/chat" not in out
    )


def steps(name: str, url: str, capsys: Captured, *more: str) -> list[str]:
    found = json.loads(printed(capsys, name, "--url", url, "--json", *more))
    return [step["content"] for step in found["steps"]]


def test_codex_gets_toml_that_names_the_responses_api(url: str, capsys: Captured) -> None:
    settings = tomllib.loads(steps("codex", url, capsys)[0])["model_providers"]["monotape"]
    assert (settings["base_url"], settings["wire_api"]) == (f"{url}/v1", "responses")
    command = steps("codex", url, capsys, "--api-key", "secret")[1]
    assert f"export {settings['env_key']}=secret" in command
    assert "model_context_window=40960" in command


def test_claude_code_waits_for_a_slow_machine(url: str, capsys: Captured) -> None:
    """With its own limits it drops the stream after 300 seconds; both have to be set for it to wait longer."""
    (command,) = steps("claude-code", url, capsys)
    given = dict(re.findall(r"export (\w+)=(\S+)", command))
    assert given["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == given["API_TIMEOUT_MS"] == "3600000"
    assert given["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10240"


def test_opencode_and_aider_get_json_with_the_limits(url: str, capsys: Captured) -> None:
    provider = json.loads(steps("opencode", url, capsys)[0])["provider"]["monotape"]
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": NO_KEY}
    assert provider["models"]["qwen2.5-coder"]["limit"] == {"context": 40_960, "output": 10_240}
    limits = json.loads(steps("aider", url, capsys)[0])["openai/qwen2.5-coder"]
    assert (limits["max_input_tokens"], limits["max_output_tokens"]) == (40_960, 10_240)


def test_python_and_the_shell_parse(url: str, capsys: Captured) -> None:
    compile(steps("python", url, capsys)[0], "connect", "exec")
    body = re.search(r"-d '(.*)'", steps("curl", url, capsys)[0], re.DOTALL)
    assert body and json.loads(body[1])["model"] == "qwen2.5-coder"


def test_without_a_server_the_model_must_be_named(capsys: Captured) -> None:
    nowhere = "http://127.0.0.1:9"
    assert main(["connect", "codex", "--url", nowhere]) == 2
    assert "monotape serve" in capsys.readouterr().err
    assert "--model mine" in printed(
        capsys, "codex", "--url", nowhere, "--model", "mine", "--max-model-len", "9999"
    )


def test_a_short_context_is_pointed_out(url: str, capsys: Captured) -> None:
    assert main(["connect", "claude-code", "--model", "m", "--max-model-len", "20000"]) == 0
    assert "note: Claude Code sends about 19000 tokens before your first word" in capsys.readouterr().err
    assert main(["connect", "claude-code", "--model", "m", "--max-model-len", "32768"]) == 0
    assert capsys.readouterr().err == ""
    for agent in ("claude-code", "aider"):
        assert main(["connect", agent, "--url", url]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["cursorr"], "No agent 'cursorr'"), (["codex", "--url", "ftp://here"], "not the address of a server"),
        (["codex", "--url", "http://here:99999"], "no port that can be"),
        (["codex", "--model", "m", "--max-model-len", "0"], "--max-model-len is 0"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(arguments: list[str], complaint: str, capsys: Captured) -> None:
    assert main(["connect", *arguments]) == 2
    err = capsys.readouterr().err
    assert complaint in err and "hint:" in err


@pytest.mark.parametrize("name", ISSUE)
def test_the_page_of_each_agent_says_the_same(name: str) -> None:
    text = (ROOT / "docs" / "agents" / f"{name}.md").read_text("utf-8")
    assert as_markdown(agents()[name], Target("http://127.0.0.1:8000", "smollm2", 32_768)) in text
