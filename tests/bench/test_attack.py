"""bench/attack.py, from the command line to its report, with attacks that are small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import need_proc

ROOT = Path(__file__).parents[2]
SMALL = ("--kills", "1", "--idle", "3", "--half", "2", "--patience", "1", "--floods", "2", "--seconds", "5")


@pytest.mark.long  # four servers; what it measures is proven by tests/server/test_attacks.py and test_orphans.py
def test_small_attacks_leave_nothing_behind() -> None:
    need_proc()
    done = subprocess.run(
        [sys.executable, "bench/attack.py", *SMALL, "--schemas", "1"], cwd=ROOT, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    kill, idle, flood, bombs = report["results"]
    assert kill["times_with_orphans"] == 0
    assert (idle["idle_left"], idle["half_finished_left"]) == (3, 2)  # a second is less than they are allowed
    assert flood["connections_cut"] >= 1 and flood["sent_mb"] >= 0
    assert (bombs["answers"], bombs["answers_with_a_panic"]) == ("400", 0)
    for result in (idle, flood, bombs):
        assert result["plain_requests"] >= 1 and result["plain_not_answered"] == 0
        assert 0 < result["memory_before_mb"] <= result["memory_peak_mb"] + 1
