"""`monotape run` as a person or a program calls it, on a small checkpoint without a tokenizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.cpu_cases import PROMPT, cpu, generate, ids
from monotape.cli.main import main

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


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ctrl-C, and again if it came while the interpreter was still starting."""
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.communicate()
    raise AssertionError("three interrupts did not end it")


def test_interrupt_keeps_what_was_said_and_exits_cleanly(tmp_path: Path) -> None:
    """A real process, a real signal: the ids so far are printed and the exit code is the shell's for Ctrl-C."""
    from families import Case, make_checkpoint

    fields = {"head_dim": 10, "max_position_embeddings": 200_000, "eos_token_id": None}
    folder = make_checkpoint(Case("endless", "llama", fields), tmp_path)
    command = [sys.executable, "-m", "monotape", "run", "--model", str(folder), "--prompt-ids", PROMPT_IDS]
    environment = {**os.environ, "PYTHONPATH": "src"}
    process = subprocess.Popen(
        [*command, "--max-tokens", "150000", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    time.sleep(3)
    out, err = interrupt(process)
    assert "Traceback" not in err
    assert process.returncode == 130, err
    answer = json.loads(out)
    assert answer["finish_reason"] == "abort"
    assert 0 < len(answer["token_ids"]) < 150_000
