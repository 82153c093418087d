"""What test files share: the small checkpoints of families.py, each made once a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import compile_once
from families import BY_NAME, make_checkpoint

# The oldest packages are tested without these two.
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("busy machine", deadline=None)  # no test asserts how long anything takes
    settings.load_profile("busy machine")
if find_spec("xdist"):
    from sharing import (  # noqa: F401
        pytest_collection_modifyitems,
        pytest_xdist_make_scheduler,
        pytest_xdist_setupnodes,
    )

# A shell starts what runs in its background with interrupts ignored, and children inherit that. Tests interrupt some
# of them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


compile_once.enter()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case of families.py, by name."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(BY_NAME[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names at the end the tests that were skipped for want of a browser, where they are not overlooked."""
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if "no browser" in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.section("NOT RUN", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} browser tests did NOT run: there is no browser. `make test` gets one."
        )
