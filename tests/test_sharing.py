"""Tests of tests/sharing.py: a file stays in one process, and the order names files that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from sharing import LONGEST, SharedFiles, rank

ROOT = Path(__file__).parent.parent


def test_the_order_names_what_exists() -> None:
    assert [part for part in LONGEST if not (ROOT / part).exists()] == []


def test_folders_share_a_process_and_the_longest_come_first() -> None:
    def scope(nodeid: str) -> str:
        return SharedFiles._split_scope(SharedFiles.__new__(SharedFiles), nodeid)

    assert scope("tests/cluster/test_chat.py::test_x[a::b]") == scope("tests/cluster/test_kept.py::test_y")
    assert scope("tests/server/test_chat.py::test_x[a::b]") == "tests/server/test_chat.py"
    names = [
        "tests/plan/test_rules.py::test_x",
        "tests/cluster/test_kept.py::test_y",
        f"{LONGEST[0]}::test_z",
    ]
    assert sorted(names, key=rank) == names[::-1]


def test_a_file_stays_in_one_process() -> None:
    """With the pytest and xdist that are installed: one of them has ignored groups before."""
    files = ["tests/plan/test_rules.py", "tests/engine/test_kv_pool.py", "tests/engine/test_stop.py"]
    command = [sys.executable, "-m", "pytest", "-v", "--numprocesses", "2", "--dist", "loadfile", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    processes = defaultdict(set)
    for process, path in re.findall(r"^\[(gw\d)\].* PASSED (\S+?)::", done.stdout, re.MULTILINE):
        processes[path].add(process)
    assert sorted(processes) == sorted(files)
    assert {len(used) for used in processes.values()} == {1}
