"""`monotape chat --url`: a conversation with any server that speaks OpenAI's chat API."""

from __future__ import annotations

import io

import pytest

from monotape.cli.endpoint import Endpoint
from monotape.cli.main import main
from monotape.errors import RequestError, UsageError
from server.fake_openai import STORY, Script, running
from waiting import until

Captured = pytest.CaptureFixture[str]


def chat(monkeypatch: pytest.MonkeyPatch, typed: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["chat", *arguments])


@pytest.mark.parametrize("dialect", ["monotape", "llamacpp", "plain"])
def test_a_conversation_with_any_server(
    dialect: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    script = Script(dialect=dialect, tokens_per_second=3000)
    with running(script) as url:
        typed = "hello\nand then?\n/clear\nafresh\n"
        assert (
            chat(monkeypatch, typed, "--url", url, "--system", "brief", "--max-tokens", "9", "--stats") == 0
        )
    captured = capsys.readouterr()
    assert captured.out.count("A tape recorder keeps a voice by dragging") == 3
    roles = [[message["role"] for message in request["messages"]] for request in script.requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert script.requests[1]["messages"][2]["content"] == " ".join(STORY.split(" ")[:9])
    assert all(request["max_tokens"] == 9 and "temperature" not in request for request in script.requests)
    assert captured.err.count("9 tokens · first token after") == 3
    assert ("tok/s in the engine" in captured.err) == (dialect != "plain")


@pytest.mark.parametrize(
    ("drafted", "accepted", "told"), [(9, 6, "drafts: 9, accepted 6"), (0, 0, ""), (None, 0, "")]
)
def test_drafts_are_told_where_the_server_counts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, drafted: int | None, accepted: int, told: str
) -> None:
    with running(Script(tokens_per_second=3000, drafted=drafted, accepted=accepted)) as url:
        assert chat(monkeypatch, "hello\n", "--url", url, "--max-tokens", "9", "--stats") == 0
    line = capsys.readouterr().err
    assert told in line and ("drafts" in line) == bool(told)


def test_a_refused_question_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    script = Script(tokens_per_second=3000)
    with running(script) as url:
        typed = "please refuse\nplease be busy\nplease break\nhello\n"
        assert chat(monkeypatch, typed, "--url", url, "--max-tokens", "9") == 2
    captured = capsys.readouterr()
    assert "answered 400: This model's maximum context length is 8192 tokens" in captured.err
    assert "Try again in 2 s" in captured.err
    assert "The engine died" in captured.err
    assert [message["content"] for message in script.requests[-1]["messages"]] == ["hello"]
    assert captured.out.endswith("by dragging a\n")


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Of every command that talks with a server; a flag goes before the variable."""
    with running(Script(key="secret", tokens_per_second=3000)) as url:
        monkeypatch.setenv("MONOTAPE_API_KEY", "secret")
        assert chat(monkeypatch, "hello\n", "--url", url, "--max-tokens", "5") == 0
        assert main(["bench", "serve", "--url", url, "--requests", "1", "--max-tokens", "4"]) == 0
        assert main(["connect", "codex", "--url", url]) == 0
        assert "MONOTAPE_API_KEY=secret" in capsys.readouterr().out
        assert chat(monkeypatch, "hello\n", "--url", url, "--api-key", "wrong") == 2


def test_the_key_and_the_model_are_checked(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with running(Script(key="secret", tokens_per_second=3000)) as url:
        assert chat(monkeypatch, "hello\n", "--url", url) == 2
        assert "--api-key" in capsys.readouterr().err
        assert chat(monkeypatch, "hello\n", "--url", url, "--api-key", "secret", "--model", "other") == 2
        assert "It offers: smollm2." in capsys.readouterr().err
        assert chat(monkeypatch, "hello\n", "--url", url, "--api-key", "secret", "--max-tokens", "5") == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--workers", "2"], "--workers does nothing with --url"),
        (["--api-key", "secret"], "--api-key is for a server"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_are_refused(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert chat(monkeypatch, "", *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_addresses_are_taken_with_and_without_v1() -> None:
    for text in (
        "127.0.0.1:8000",
        "http://127.0.0.1:8000/",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000/v1/",
    ):
        assert Endpoint(text).url == "http://127.0.0.1:8000"
    assert Endpoint("https://here.example/proxy/v1").url == "https://here.example/proxy"
    with pytest.raises(UsageError):
        Endpoint("http://")


def test_closing_an_answer_tells_the_server_to_stop() -> None:
    script = Script(tokens_per_second=200)
    with running(script) as url:
        stream = Endpoint(url).stream_chat(
            {
                "model": "smollm2",
                "messages": [{"role": "user", "content": "on and on"}],
                "max_tokens": 100_000,
            }
        )
        for chunk in stream:
            if chunk.text:
                break
        stream.close()
        until(lambda: script.cancelled)
    assert (script.cancelled, script.finished) == (1, 0)


def test_an_answer_without_its_end_is_an_error() -> None:
    with running(Script(tokens_per_second=3000)) as url:
        messages = [{"role": "user", "content": "please vanish"}]
        with pytest.raises(RequestError, match="broke off"):
            list(Endpoint(url).stream_chat({"model": "smollm2", "messages": messages}))
