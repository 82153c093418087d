"""The other commands: inspect, doctor, chat, help."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from monotape.cli.chat import Conversation
from monotape.cli.main import COMMANDS, main
from monotape.plan.text import dump

Checkpoint = Callable[[str], Path]
Captured = pytest.CaptureFixture[str]


def test_inspect_prints_the_facts_and_the_plan(checkpoint: Checkpoint, capsys: Captured) -> None:
    assert main(["inspect", str(checkpoint("qwen2")), "--workers", "3", "--dtype", "q8"]) == 0
    out = capsys.readouterr().out
    assert "Qwen2ForCausalLM" in out
    assert "worker 2" in out
    assert "qkv -> attention -> output -> gate_up -> down" in out


def test_inspect_json_names_the_plan_that_runs(checkpoint: Checkpoint, capsys: Captured) -> None:
    from backends.cpu_cases import cpu

    assert main(["inspect", str(checkpoint("qwen2")), "--json", "--workers", "2", "--dtype", "q8"]) == 0
    shown = json.loads(capsys.readouterr().out)
    with cpu(checkpoint("qwen2"), "q8", 2) as backend:
        assert shown["plan"]["digest"] == backend.plan.digest
        assert backend.plan.digest in dump(backend.plan)
    assert shown["model"]["kv_heads"] == 2


def test_doctor_measures_the_bandwidth(capsys: Captured) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu backend"]["good"]
    assert found["bandwidth"]["value"]["best"] >= found["bandwidth"]["value"]["today"] > 1e8
    assert found["packages"]["good"]
    assert "starlette" in found["serve packages"]["value"]


def test_doctor_names_cause_and_fix_where_no_compiler_is(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "MISS  compiler" in out
    assert "fix: install g++" in out


def test_without_a_compiler_the_reference_answers_and_says_so(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    from monotape.backends.cpu import bridge

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    bridge.library.cache_clear()
    arguments = [
        "run",
        "--json",
        "--model",
        str(checkpoint("llama")),
        "--prompt-ids",
        "5,6",
        "--max-tokens",
        "2",
    ]
    try:
        with pytest.warns(UserWarning, match="Falling back to the NumPy reference"):
            assert main(arguments) == 0
        assert json.loads(capsys.readouterr().out)["stats"]["backend"] == "reference"
        assert main([*arguments, "--backend", "cpu"]) == 2
        assert "C++ compiler" in capsys.readouterr().err
    finally:
        bridge.library.cache_clear()


def test_a_model_before_the_prompt_is_told_where_it_belongs(capsys: Captured) -> None:
    assert main(["run", "smollm2", "The capital of France is"]) == 2
    error = capsys.readouterr().err
    assert "does not understand 'The capital of France is'" in error
    assert "--model" in error


def test_every_command_has_help(capsys: Captured) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert len(capsys.readouterr().out) > 100
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


class _Stream:
    """The answer of a model that repeats what it was told."""

    def __init__(self, messages: list[dict[str, str]], interrupt: bool) -> None:
        self.text, self._interrupt = "", interrupt
        self._words = [f"{message['content']};" for message in messages]

    def __iter__(self) -> object:
        from monotape.engine.outputs import Delta

        for word in self._words:
            self.text += word
            yield Delta(word, (1,))
            if self._interrupt:
                raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


class _Echo:
    interrupt = False

    def stream_chat(self, messages: list[dict[str, str]], params: object) -> _Stream:
        return _Stream(messages, self.interrupt)


def test_chat_keeps_the_conversation_and_survives_an_interrupt(capsys: Captured) -> None:
    echo = _Echo()
    conversation = Conversation(echo, None, "be brief", stats=False)
    assert conversation.take("one")
    assert capsys.readouterr().out == "be brief;one;\n"
    echo.interrupt = True
    assert conversation.take("two")
    assert conversation.messages[-1] == {"role": "assistant", "content": "be brief;"}
    assert conversation.take("/clear")
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert conversation.take("/what")
    assert "Did you mean" not in capsys.readouterr().err
    assert not conversation.take("/exit")


def test_an_answer_that_was_stopped_before_its_first_word_is_no_turn() -> None:
    """The model learned from it to say nothing."""

    class Silent(_Echo):
        def stream_chat(self, messages: list[dict[str, str]], params: object) -> _Stream:
            return _Silence([], True)

    class _Silence(_Stream):
        def __iter__(self) -> object:
            raise KeyboardInterrupt

    conversation = Conversation(Silent(), None, None, stats=False)
    assert conversation.take("one")
    assert conversation.messages == []


def test_chat_reads_until_the_end_of_input(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A checkpoint without a chat template cannot chat, and says what to do instead."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", "--model", str(checkpoint("llama"))]) == 2
    assert "hint:" in capsys.readouterr().err
