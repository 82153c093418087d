"""How busy a machine is: seconds of all kinds of work, and of nothing else."""

from __future__ import annotations

import os

import pytest

import stored
from quiet import _busy_seconds, busy_cores


def test_work_counts_and_idleness_does_not() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    # user nice system idle iowait irq softirq steal guest guest_nice: guests are in user and nice already
    line = f"cpu  {ticks} {2 * ticks} {4 * ticks} 999 999 {8 * ticks} {16 * ticks} {32 * ticks} 999 999"
    assert _busy_seconds(f"{line}\ncpu0 1 2 3\n") == 63


def test_this_machine_says_how_busy_it_is_or_that_it_cannot() -> None:
    found = busy_cores(0.05)
    assert found is None or found >= 0


def test_nothing_is_saved_from_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["stored.py", "--save", "x.gguf"])
    monkeypatch.setattr(stored, "busy_cores", lambda seconds=1.0: 1.25)
    with pytest.raises(SystemExit, match=r"^Other work takes 1\.25 cores of this machine\."):
        stored.main()
