"""The planner's words and figures, byte for byte, whatever the machine's language, terminal or hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import monotape
from planner.goldens import COMMANDS, GOLDEN, output_of


@pytest.mark.parametrize("name", COMMANDS)
def test_text_is_as_committed(name: str) -> None:
    """Write them anew with `python tests/planner/goldens.py` and review the diff."""
    assert output_of(COMMANDS[name]) == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_nothing_else_is_committed() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(COMMANDS)


@pytest.mark.parametrize(
    "surroundings",
    [
        {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8", "COLUMNS": "40", "PYTHONHASHSEED": "1"},
        {
            "LC_ALL": "C",
            "TERM": "dumb",
            "COLUMNS": "300",
            "PYTHONHASHSEED": "2",
            "PYTHONUTF8": "0",
            "TZ": "Asia/Tokyo",
        },
    ],
    ids=["german, narrow", "plain, wide"],
)
def test_surroundings_change_nothing(surroundings: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(monotape.__file__).parents[1]), **surroundings}
    for name in ("llama-3.1-8b-request-and-agent", "json-llama-3.2-1b"):
        done = subprocess.run(
            [sys.executable, "-m", "monotape", "plan", *COMMANDS[name]], capture_output=True, check=True,
            env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.stdout == (GOLDEN / f"{name}.txt").read_bytes()


def test_no_line_of_text_is_longer_than_the_fixed_width() -> None:
    for name in COMMANDS:
        if not name.startswith("json"):
            assert max(map(len, (GOLDEN / f"{name}.txt").read_text().splitlines())) <= 116
