"""The share of the bandwidth that a request is told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from monotape.backends.cpu import bandwidth
from monotape.backends.cpu.bandwidth import Bandwidth
from monotape.cli.statistics import stats_line, stats_object
from monotape.engine.outputs import GenerationStats


def backend(name: str = "cpu") -> Any:
    plan = SimpleNamespace(formats="q8", machine=SimpleNamespace(workers=2), ranks=(None,))
    return SimpleNamespace(name=name, plan=plan)


def stats(speed: float) -> GenerationStats:
    return GenerationStats(5, 0, 11, 0.1, 10 / speed, speed, 100_000_000)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Bandwidth]:
    """A machine whose kept figure is 5 GB/s and which now reads 20; the list holds what was remembered."""
    kept: list[Bandwidth] = []
    monkeypatch.setattr(bandwidth, "known_bandwidth", lambda: kept[-1] if kept else Bandwidth(5e9, 2, "any"))
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda: Bandwidth(20e9, 2, "any"))
    monkeypatch.setattr(bandwidth, "remember_bandwidth", lambda found: kept.append(found) or found)
    return kept


def test_a_slower_request_trusts_the_kept_figure(measured: list[Bandwidth]) -> None:
    assert stats_object(stats(25), backend())["bandwidth_share"] == pytest.approx(0.5)
    assert measured == []


def test_a_request_that_beats_the_kept_figure_has_it_measured_again(measured: list[Bandwidth]) -> None:
    assert "50 % of the 20.0 GB/s" in stats_line(stats(100), backend())
    assert [found.bytes_per_second for found in measured] == [20e9]


def test_what_beats_the_memory_came_from_the_cache(measured: list[Bandwidth]) -> None:
    assert "150 % of the 20.0 GB/s this machine reads (some of it from the cache)" in stats_line(
        stats(300), backend()
    )


def test_a_gpu_is_not_held_against_the_bandwidth_of_the_cores(measured: list[Bandwidth]) -> None:
    assert stats_object(stats(100), backend("cuda"))["bandwidth_share"] is None


def test_drafts_are_told_where_there_were_any(measured: list[Bandwidth]) -> None:
    drafted = dataclasses.replace(stats(25), drafted_tokens=9, accepted_tokens=6)
    assert " · drafts: 9, accepted 6 · " in stats_line(drafted, backend())
    assert "drafts" not in stats_line(stats(25), backend())
    found = stats_object(drafted, backend())
    assert (found["drafted_tokens"], found["accepted_tokens"]) == (9, 6)
