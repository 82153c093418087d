"""Importing the package is cheap, and everything it names is there."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import monotape

HEAVY = (
    "torch", "transformers", "starlette", "uvicorn", "msgspec", "gguf", "huggingface_hub", "numpy",
    "tokenizers", "rich", "minijinja", "jinja2", "ray",
)  # fmt: skip
NEVER = ("torch", "transformers", "starlette", "uvicorn", "msgspec", "jinja2", "ray")


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    return set(json.loads(done.stdout))


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(monotape.__file__).parents[1])}


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert modules_after("import monotape").isdisjoint(HEAVY)


def test_the_engine_needs_no_test_or_server_package() -> None:
    names = ", ".join(name for name in monotape.__all__ if name != "__version__")
    loaded = modules_after(f"from monotape import {names}")
    assert "monotape.engine.llm" in loaded
    assert loaded.isdisjoint(NEVER)


def test_a_command_imports_itself_and_no_other() -> None:
    loaded = modules_after("from monotape.cli.main import main\nassert main(['run']) == 2")
    assert "monotape.cli.run" in loaded
    assert loaded.isdisjoint({"monotape.cli.serve", "monotape.cli.bench", "http.client", "numpy"})


def test_only_a_deployment_imports_ray() -> None:
    """Not even the flags of `deploy`, which --help and completions print."""
    loaded = modules_after("from monotape.cli.main import build_parser\nbuild_parser()")
    assert "monotape.cli.deploy" in loaded
    assert "ray" not in loaded


def test_a_folder_of_safetensors_needs_neither_a_hub_nor_gguf() -> None:
    loaded = modules_after("import monotape.engine.llm, monotape.engine.startup")
    unneeded = {
        "monotape.weights.hub",
        "monotape.weights.gguf_file",
        "monotape.engine.constrained",
        "monotape.engine.guided",
    }
    assert loaded.isdisjoint(unneeded)


def test_the_planner_knows_the_families_without_numpy() -> None:
    loaded = modules_after("import monotape.planner.estimate")
    assert "monotape.models.registry" in loaded
    assert "numpy" not in loaded


@pytest.mark.parametrize("name", monotape.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(monotape, name) is not None
    assert name in dir(monotape)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        monotape.Llm  # noqa: B018


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert monotape.__version__ == project["version"]
