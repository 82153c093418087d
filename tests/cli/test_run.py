"""`monotape run` as a person or a program calls it, on a small checkpoint without a tokenizer."""

from __future__ import annotations

import json
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
