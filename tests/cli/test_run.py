"""`monotape run` as a person or a program calls it, on a small checkpoint without a tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.cpu_cases import PROMPT, cpu, generate, ids
from monotape.backends.protocol import Token
from monotape.cli.main import main
from monotape.engine.outputs import Delta

Checkpoint = Callable[[str], Path]
Captured = pytest.CaptureFixture[str]
PROMPT_IDS = ",".join(map(str, PROMPT[:5]))


def run_json(capsys: Captured, *arguments: str) -> dict[str, object]:
    assert main(["run", "--json", "--prompt-ids", PROMPT_IDS, *arguments]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_json_holds_text_ids_and_stats(checkpoint: Checkpoint, capsys: Captured) -> None:
    answer = run_json(capsys, "--model", str(checkpoint("llama")), "--max-tokens", "12", "--temperature", "0")
    with cpu(checkpoint("llama")) as backend:
        expected = ids(generate(backend, count=12, stop_ids=(2,)))
    assert answer["token_ids"] == expected
    assert answer["text"] == ""  # no tokenizer
    stats = answer["stats"]
    assert isinstance(stats, dict)
    assert stats["prompt_tokens"] == 5
    assert stats["new_tokens"] == len(expected)
    assert stats["bytes_per_token"] > 0
    assert stats["read_bandwidth"] > 0


def test_json_says_what_was_loaded_and_how_it_sampled(checkpoint: Checkpoint, capsys: Captured) -> None:
    model = str(checkpoint("llama"))
    answer = run_json(capsys, "--model", model, "--max-tokens", "2", "--top-k", "5")
    assert answer["model"] == {"name": model, "loaded": model}
    sampling = answer["sampling"]
    assert isinstance(sampling, dict)
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, 5)
    assert "Monotape's own" in sampling["defaults"]


def test_stats_say_what_was_loaded_and_how_it_sampled(checkpoint: Checkpoint, capsys: Captured) -> None:
    model = str(checkpoint("llama"))
    arguments = [
        "run",
        "--prompt-ids",
        PROMPT_IDS,
        "--model",
        model,
        "--max-tokens",
        "2",
        "--stats",
        "--seed",
        "3",
    ]
    assert main([*arguments, "--temperature", "0.4"]) == 0
    err = capsys.readouterr().err
    assert (
        "temperature 0.4 (as asked), top-p 0.9 (Monotape's own, because the model names none), seed 3" in err
    )
    assert model in err
    assert main([*arguments, "--temperature", "0"]) == 0
    assert "greedy (as asked)" in capsys.readouterr().err


def test_help_says_how_a_model_samples_when_nobody_says(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 for greedy (default: what the model's files say; 0.2 for SmolLM2; else 0.7)" in shown


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_backends_agree(checkpoint: Checkpoint, capsys: Captured, backend: str) -> None:
    model = str(checkpoint("qwen3"))
    answer = run_json(
        capsys, "--model", model, "--backend", backend, "--temperature", "0", "--max-tokens", "20"
    )
    other = run_json(capsys, "--model", model, "--temperature", "0", "--max-tokens", "20", "--workers", "3")
    assert answer["token_ids"] == other["token_ids"]


def test_seeds_repeat(checkpoint: Checkpoint, capsys: Captured) -> None:
    arguments = ("--model", str(checkpoint("llama")), "--temperature", "1.2", "--max-tokens", "15")
    first, again, other = (run_json(capsys, *arguments, "--seed", seed) for seed in ("7", "7", "8"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert first["seed"] == 7


def test_without_a_tokenizer_ids_are_printed(checkpoint: Checkpoint, capsys: Captured) -> None:
    arguments = ["run", "--prompt-ids", PROMPT_IDS, "--model", str(checkpoint("llama")), "--max-tokens", "3"]
    assert main([*arguments, "--temperature", "0", "--stats"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.strip().split(",")) == 3
    assert "tok/s" in captured.err
    assert "GB/s" in captured.err


def test_interrupted_json_holds_what_was_said(
    checkpoint: Checkpoint, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monotape.engine.stream import TextStream

    take, taken = TextStream._take, []

    def interrupted(stream: TextStream, token: Token) -> Delta:
        taken.append(token.id)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return take(stream, token)

    monkeypatch.setattr(TextStream, "_take", interrupted)
    arguments = ["--prompt-ids", PROMPT_IDS, "--model", str(checkpoint("llama")), "--max-tokens", "90"]
    assert main(["run", "--json", *arguments]) == 130
    answer = json.loads(capsys.readouterr().out)
    assert answer["finish_reason"] == "abort"
    assert answer["token_ids"] == taken[:3]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer that has a token for each of a few words."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    from families import BY_NAME, VOCAB, make_checkpoint

    folder = make_checkpoint(BY_NAME["llama"], tmp_path_factory.mktemp("speaking"))
    words = ["[unknown]", "sky", "blue", "why", "is"]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"w{index}": index for index in range(len(words), VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[unknown]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = WhitespaceSplit(), ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run_with(speaking: Path, text: str | bytes | None, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command with this text piped in; None: nothing is."""
    command = [
        sys.executable,
        "-m",
        "monotape",
        "run",
        "--model",
        str(speaking),
        "--json",
        "--max-tokens",
        "1",
    ]
    return subprocess.run(
        [*command, *arguments],
        input=text.encode() if isinstance(text, str) else text,
        stdin=subprocess.DEVNULL if text is None else None,
        env={**os.environ, "PYTHONPATH": "src"}, capture_output=True, check=False,
    )  # fmt: skip


def prompt_tokens(done: subprocess.CompletedProcess[bytes]) -> int:
    assert done.returncode == 0, done.stderr
    count: int = json.loads(done.stdout)["stats"]["prompt_tokens"]
    return count


def test_piped_text_is_the_prompt(speaking: Path) -> None:
    """`echo ... | monotape run` answered that there must be a prompt."""
    assert prompt_tokens(run_with(speaking, "why is sky blue\n")) == 4
    assert prompt_tokens(run_with(speaking, "why is sky blue\n", "-")) == 4


def test_piped_text_stands_beside_a_prompt(speaking: Path) -> None:
    assert prompt_tokens(run_with(speaking, "sky blue\n", "why")) == 3
    assert prompt_tokens(run_with(speaking, None, "why")) == 1
    assert prompt_tokens(run_with(speaking, "", "why")) == 1


def test_the_question_comes_after_the_text_it_is_about(
    speaking: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from monotape.cli.run import _prompt

    (tmp_path / "text").write_text("first line\nsecond line\n")
    with (tmp_path / "text").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert _prompt("Why?") == "first line\nsecond line\n\nWhy?"


def test_an_empty_pipe_beside_a_prompt_is_pointed_out(speaking: Path) -> None:
    """`cat missing | monotape run "Summarise this."` would make a text up."""
    ran = run_with(speaking, "", "Summarise this.")
    assert ran.returncode == 0
    assert b"monotape: standard input is empty; the prompt stands alone." in ran.stderr
    assert b"standard input" not in run_with(speaking, None, "Summarise this.").stderr


def test_an_answer_that_the_default_length_ends_says_so(
    checkpoint: Checkpoint, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monotape.cli.run.DEFAULT_MAX_TOKENS", 3)
    model = str(checkpoint("llama"))
    assert main(["run", "--model", model, "--prompt-ids", "5,6,7", "--backend", "cpu"]) == 0
    assert capsys.readouterr().err == "monotape: stopped after 3 tokens; --max-tokens N allows more.\n"
    assert (
        main(["run", "--model", model, "--prompt-ids", "5,6,7", "--backend", "cpu", "--max-tokens", "3"]) == 0
    )
    assert capsys.readouterr().err == ""


def test_nothing_piped_and_no_prompt(speaking: Path) -> None:
    for text in (None, "", b"\xff\xfe"):
        done = run_with(speaking, text)
        assert done.returncode == 2
        assert (b"UTF-8" if text else b"pipe text in") in done.stderr


def test_a_pipe_that_nobody_writes_to_is_waited_for_with_a_word(speaking: Path) -> None:
    """An agent may leave it open: silence would look like a hang."""
    command = [sys.executable, "-m", "monotape", "run", "why", "--model", str(speaking), "--max-tokens", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "src"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert b"waiting for text on standard input" in process.stderr.readline()
        process.communicate()
    assert process.returncode == 0


def test_ids_do_not_wait_for_a_pipe(speaking: Path) -> None:
    assert prompt_tokens(run_with(speaking, "ignored", "--prompt-ids", "1,2")) == 2
