"""`monotape inspect --backend hip`: the plan of an MI300X, with what is known of it, on a machine without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.host_setups import CASES
from families import make_checkpoint
from monotape.cli.main import main

Captured = pytest.CaptureFixture[str]


def test_the_plan_says_that_nobody_has_run_it(tmp_path: Path, capsys: Captured) -> None:
    folder = str(make_checkpoint(CASES["narrow"], tmp_path))
    assert main(["inspect", folder, "--backend", "hip", "--workers", "304"]) == 0
    out = capsys.readouterr().out
    assert "machine  hip, 304 workers" in out
    assert "AMD CDNA3: compiled and simulated, never run on hardware" in out
    assert "straight into registers" in out and "ring" not in out.split("rank 0")[1].split("stages")[0]
    assert main(["inspect", folder, "--backend", "hip", "--workers", "304", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["plan"]["machine"]["kind"] == "hip"
