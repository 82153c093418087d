"""Imports flow one way: cli -> server -> engine -> compiler | backends -> models, weights -> plan -> config, errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "monotape"
#: What each part may import of the package, itself aside.
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "plan": {"config", "errors"},
    "models": {"plan", "config", "errors"},
    "weights": {"models", "plan", "config", "errors"},
    "compiler": {"models", "weights", "plan", "config", "errors"},
    "backends": {"models", "weights", "plan", "config", "errors"},
    "training": {"models", "weights", "plan", "config", "errors"},
    "planner": {"models", "weights", "plan", "config", "errors"},
    "engine": {"compiler", "backends", "models", "weights", "plan", "config", "errors"},
    "server": {"engine", "compiler", "backends", "models", "weights", "plan", "config", "errors"},
    "cli": {
        "server",
        "engine",
        "planner",
        "compiler",
        "backends",
        "models",
        "weights",
        "plan",
        "config",
        "errors",
    },
}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in MAY_IMPORT)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("monotape.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_below(path: Path) -> None:
    part = part_of(path)
    assert imported_parts(path) <= MAY_IMPORT[part] | {part}


def test_no_part_is_forgotten() -> None:
    assert {part_of(path) for path in SOURCES} <= set(MAY_IMPORT)
