"""Tests of tests/sharing.py: a file stays in one process, but for some, and the order names files that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from sharing import LAST, LONGEST, SINGLY, SharedFiles, rank

ROOT = Path(__file__).parent.parent


def test_the_order_names_what_exists() -> None:
    assert [part for part in (*LONGEST, LAST.split("::")[0]) if not (ROOT / part).exists()] == []
    assert list(ROOT.glob(f"{SINGLY}*.py"))


def test_folders_share_a_process_and_the_longest_come_first() -> None:
    def scope(nodeid: str) -> str:
        return SharedFiles._split_scope(SharedFiles.__new__(SharedFiles), nodeid)

    assert scope("tests/cluster/test_chat.py::test_x[a::b]") == scope("tests/cluster/test_kept.py::test_y")
    assert scope("tests/server/test_chat.py::test_x[a::b]") == "tests/server/test_chat.py"
    assert scope(f"{SINGLY}races.py::test_x[a::b]") == f"{SINGLY}races.py::test_x[a::b]"
    names = [
        LAST,
        f"{SINGLY}races.py::test_w",
        "tests/plan/test_rules.py::test_x",
        f"{LONGEST[1]}::test_z",
        "tests/cluster/test_kept.py::test_y",
    ]
    assert sorted(names, key=rank) == names[::-1]


def test_a_file_stays_in_one_process(tmp_path: Path) -> None:
    """With the pytest and xdist that are installed: one of them has ignored groups before."""
    (tmp_path / "conftest.py").write_text("from sharing import *\n")
    files = [f"test_{name}.py" for name in "abc"]
    for file in files:
        cases = "import pytest\n@pytest.mark.parametrize('x', range(9))\ndef test_it(x): pass\n"
        (tmp_path / file).write_text(cases)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "xdist",
        "--numprocesses",
        "2",
        "--dist",
        "loadfile",
    ]
    others = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which take seconds to import in each process
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")} | others
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scheduling tests via SharedFiles" in done.stdout
    processes = defaultdict(set)
    for process, path in re.findall(r"^\[(gw\d)\].* PASSED (\S+?)::", done.stdout, re.MULTILINE):
        processes[path].add(process)
    assert sorted(processes) == files
    assert {len(used) for used in processes.values()} == {1}
