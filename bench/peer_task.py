"""The task that every compared engine gets, and its answer: decode speeds and times to the first token."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from report import ROOT

CHILD = ROOT / "bench" / "peer_child.py"
_FOLDERS = re.compile(
    r"(?<![\w.:/])/(?:[\w.+@-]+/)+"
)  # that only this machine has, before the name of a file
_TOLD = 1500  # characters of what a peer that failed had said last


@dataclass(frozen=True, slots=True)
class Task:
    """One shape: `tokens` tokens after a prompt of each context, and one token after each prompt length."""

    shape: str
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    tokens: int
    requests: int
    device: str = "cuda"
    stored: str | None = None  # how the layers are stored, where that is not bf16: see bench/stored_shapes.py

    @property
    def most_positions(self) -> int:
        return max(
            [*(context + self.tokens for context in self.contexts), *(prompt + 8 for prompt in self.prompts)]
        )


@dataclass(slots=True)
class Answer:
    """What an engine measured so far: all runs, by context and by prompt. `error` says why some are missing."""

    version: str = ""
    settings: str = ""
    start_s: float | None = None
    tokens_per_second: dict[int, list[float]] = field(default_factory=dict)
    first_token_s: dict[int, list[float]] = field(default_factory=dict)
    error: str = ""

    def keep(self, path: Path) -> None:
        """Whole or not at all: the engine may be ended while it writes."""
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, path)


def read_answer(path: Path) -> Answer:
    found: dict[str, Any] = json.loads(path.read_text())
    for name in ("tokens_per_second", "first_token_s"):
        found[name] = {int(length): runs for length, runs in found[name].items()}
    return Answer(**found)


def ask(engine: str, task: Task, timeout_s: float) -> Answer:
    """Runs a peer in a process of its own, which gives its memory back. What it measured before it failed is kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answer.json")
        command = [sys.executable, str(CHILD), engine, json.dumps(asdict(task)), str(path)]
        import_path = os.pathsep.join(
            [str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
        )
        environment = {**os.environ, "PYTHONPATH": import_path}
        error = ""
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            if done.returncode:
                error = f"ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-_TOLD:]}"
        except subprocess.TimeoutExpired:
            error = f"took longer than {timeout_s:.0f} s"
        answer = read_answer(path) if path.exists() else Answer()
    answer.error = _FOLDERS.sub("", answer.error or error)
    return answer


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start
