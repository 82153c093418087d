"""The package as users install it: one wheel for every Python that needs no checkout, and commands that work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from server.small_models import gguf_file

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Says where the package comes from, then answers as the command does.
PROGRAM = """
import sys
import monotape
from monotape.cli.main import main
print(monotape.__file__, file=sys.stderr)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "src" / "monotape",
        copy / "src" / "monotape",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(made), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip builds wheels with setuptools, and no index that has it can be reached")
    assert done.returncode == 0, done.stderr
    (found,) = made.iterdir()
    return found


@pytest.mark.slow
def test_one_wheel_serves_every_python(wheel: Path) -> None:
    """It was for the Python that had built it, although its libraries know nothing of Python."""
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none") and platform != "any"
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
    assert sorted(Path(name).parent.name for name in libraries) == ["cpu", "cuda"]


@pytest.mark.slow
def test_a_wheel_answers_without_checkout_and_compiler(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    environment = {"PATH": "", "PYTHONPATH": str(target), "MONOTAPE_CACHE": str(tmp_path / "cache")}
    for model, prompt in (
        (str(gguf_file(tmp_path / "m.gguf")), "hello"),
        ("embedded", "def add(a, b):\n    return"),
    ):
        arguments = ["run", prompt, "--model", model, "--backend", "cpu", "--temperature", "0"]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments, "--max-tokens", "3", "--json"],
            cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(str(target)), "another package was imported"
        answer = json.loads(done.stdout)
        assert answer["finish_reason"] in ("stop", "length")
    assert answer["text"] == " a + b"  # the model inside the wheel


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_command_installs_from_an_index_that_does_not_have_it(document: Path) -> None:
    """Until a wheel is published, a command names a checkout or a file."""
    commands = re.findall(r"^\s*\$ (.*)$", document.read_text(), flags=re.MULTILINE)
    asked = [command for command in commands if re.search(r"\binstall\b", command)]
    assert [command for command in asked if re.search(r"[\s'\"]monotape(\[|['\"\s]|$)", command)] == []


def test_ci_runs_the_minimums_and_fails_without_a_browser() -> None:
    """What stands in .ci/run, and what `make test` would do."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert (
        "make --jobs=2 --output-sync=target check test-minimums" in lines
        and "MONOTAPE_REQUIRE_BROWSER=1 make test" in lines
    )
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    planned = subprocess.run(
        [make, "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert planned.index("browser_path.py") < planned.index("-m pytest")
