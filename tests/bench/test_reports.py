"""A speed that is quoted was measured on today's sources."""

from __future__ import annotations

import json

import pytest

from report import REPORTS, sources_hash

SPEEDS = sorted(REPORTS.glob("decode-cpu-*.json"))


def test_there_is_a_speed_to_quote() -> None:
    assert SPEEDS


@pytest.mark.parametrize("path", SPEEDS, ids=lambda path: path.stem)
def test_a_speed_belongs_to_these_sources(path: object) -> None:
    """If this fails the kernels or the plan have changed: measure again with --save, and quote the new figures."""
    report = json.loads(path.read_text())  # type: ignore[attr-defined]
    assert report["sources"] == sources_hash()
