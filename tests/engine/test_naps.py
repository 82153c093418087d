"""Naps of threads that others wait for."""

from __future__ import annotations

import sys
import threading

import pytest

from monotape.engine.naps import end_naps_on_time, timer_slack_ns


@pytest.mark.skipif(sys.platform != "linux", reason="Linux rounds naps")
def test_a_thread_wakes_up_on_time_and_others_are_left_alone() -> None:
    before, seen = timer_slack_ns(), []

    def nap() -> None:
        end_naps_on_time()
        seen.append(timer_slack_ns())

    thread = threading.Thread(target=nap)
    thread.start()
    thread.join()
    assert seen == [1000]
    assert timer_slack_ns() == before > 1000
