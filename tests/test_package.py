"""What an installed package carries beside its Python files."""

from __future__ import annotations

import fnmatch
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_every_file_of_the_package_is_installed() -> None:
    """A data file that pyproject.toml does not list is missing from the wheel, and only there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["monotape"]
    package = ROOT / "src" / "monotape"
    files = [
        path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
    ]
    names = [str(path.relative_to(package)) for path in files]
    assert len(names) > 20
    assert [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


def test_every_requirement_has_a_lower_bound() -> None:
    """Without one the first release ever counts, which is untested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = runpy.run_path(str(ROOT / ".ci" / "minimums.py"))["constraints"]
    found = constraints(project["dependencies"])
    assert f"numpy=={project['dependencies'][0].removeprefix('numpy>=')}" in found
    for extra in project["optional-dependencies"].values():
        assert constraints(extra)
    with pytest.raises(ValueError, match="no lower bound for loose"):
        constraints(["loose"])
