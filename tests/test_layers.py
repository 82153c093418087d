"""Imports flow one way: cli -> server -> engine -> compiler | backends -> models, weights -> plan -> config, errors."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
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


def imported_files(path: Path) -> set[Path]:
    """The package's files that a file names on top, for type checkers or for good; not those inside functions."""
    statements = list(ast.parse(path.read_text()).body)
    modules = []
    for node in statements:
        if isinstance(node, ast.If):  # of TYPE_CHECKING
            statements += node.body
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    paths = {PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py") for module in modules}
    return {path for path in paths if path.is_file()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """But for the server's, whose table of routes and the document of it name each other, for type checkers alone."""
    files = [path for path in SOURCES if part_of(path) != "server"]
    try:
        TopologicalSorter({path: imported_files(path) for path in files}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(path.relative_to(PACKAGE)) for path in error.args[1]))


def test_no_part_is_forgotten() -> None:
    assert {part_of(path) for path in SOURCES} <= set(MAY_IMPORT)
