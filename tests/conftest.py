"""What test files share: the small checkpoints of families.py, each made once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from families import BY_NAME, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case of families.CASES, by name."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(BY_NAME[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folder
