"""How the tests get a browser, and what happens where none can be had."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from processes import need_proc, wait_for_end
from server import browser_path

pytestmark = pytest.mark.slow


def test_a_system_browser_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser_path.find_browser() == str(program)


def test_playwrights_download_comes_first_and_then_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []
    monkeypatch.setattr(browser_path, "_run", lambda command, limit_s: tried.append(command))
    monkeypatch.setattr(browser_path, "find_browser", lambda: None)
    monkeypatch.setattr(browser_path.os, "geteuid", lambda: 0)
    monkeypatch.setattr(browser_path.shutil, "which", lambda name: f"/bin/{name}")
    assert browser_path.get_browser() is None
    assert tried[0][1:] == ["-m", "playwright", "install", "chromium"]
    assert tried[-1][:2] == ["apt-get", "install"] and tried[-1][-1] == "chromium"


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
def test_without_one_it_is_said_loudly_and_ci_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: str, code: int
) -> None:
    monkeypatch.setattr(browser_path, "find_browser", lambda: None)
    monkeypatch.setattr(browser_path, "get_browser", lambda: None)
    monkeypatch.setenv(browser_path.REQUIRED, required)
    assert browser_path.main() == code
    assert "NO BROWSER" in capsys.readouterr().err


@pytest.mark.parametrize(("required", "passes"), [("", True), ("1", False)])
def test_tests_without_a_browser_are_named_at_the_end_or_fail(
    tmp_path: Path, required: str, passes: bool
) -> None:
    """They were once skipped without notice."""
    folder = Path(__file__).parent
    environment = {
        **os.environ, "PATH": "", "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path), browser_path.REQUIRED: required,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins take seconds to import
    }  # fmt: skip
    plugins = ["-p", "xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, str(folder / "test_playground_phone.py")],
        cwd=folder.parents[1], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == passes, done.stdout
    assert ("browser tests did NOT run" in done.stdout) == passes
    assert passes or f"{browser_path.REQUIRED} is set, and there is no browser" in done.stdout


def test_an_attempt_that_hangs_is_ended(tmp_path: Path) -> None:
    """With what it has started."""
    need_proc()
    started = tmp_path / "started"
    hangs = f"sleep 3600 & echo $! > {shlex.quote(str(started))}; wait"
    assert browser_path._run(["sh", "-c", hangs], 2.0) is False
    wait_for_end(int(started.read_text()))


def test_a_program_that_is_not_there_is_no_accident() -> None:
    assert browser_path._run(["no-such-program"], 1.0) is False
