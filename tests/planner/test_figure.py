"""Pictures: their data is the planner's, the same data gives the same bytes, and the README's figure is up to date."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from monotape.errors import ResourceError, UsageError
from monotape.planner.estimate import estimate
from monotape.planner.figure import figure_of
from monotape.planner.plot import draw, render
from monotape.planner.reports import load_reports
from planner.test_reports import decode_report

ROOT = Path(__file__).parents[2]
README_FIGURE = ROOT / "docs" / "figures" / "speed-of-light.svg"


def test_the_data_of_a_figure() -> None:
    found = estimate("llama-3.2-1b")
    figure = figure_of(found, {"r.json": decode_report()})
    assert figure.contexts[0] == 32
    assert figure.contexts[-1] == 131072
    assert set(figure.lines) == {"datasheet", "effective", "measured", "Monotape, predicted"}
    at_4096 = figure.contexts.index(4096)
    ceilings = {one.name: one.tokens_per_second for one in found.ceilings}
    assert {name: figure.lines[name][at_4096] for name in ceilings} == ceilings
    assert all(
        a > b for a, b in zip(figure.lines["measured"], figure.lines["Monotape, predicted"], strict=True)
    )
    bars = [sum(values) for values in zip(*figure.bars.values(), strict=True)]
    assert bars == sorted(bars)
    assert bars[0] == pytest.approx(found.load.pass_bytes(32) / 1e9)
    assert ("Monotape, some.gguf, Some CPU", 0.66, True) in figure.shares
    assert [share for _, share, _ in figure.shares] == sorted(share for _, share, _ in figure.shares)


def test_a_short_context_ends_the_lines() -> None:
    assert figure_of(estimate("tinyllama-1.1b", context=100), {}).contexts[-1] == 2048


def test_a_link_of_unknown_latency_leaves_out_the_prediction() -> None:
    figure = figure_of(estimate("gpt-oss-20b", gpu="rtx-4090", count=2), {})
    assert set(figure.lines) == {"datasheet", "effective"}
    assert figure.shares == ()
    assert render(figure, "png").startswith(b"\x89PNG")


def test_the_same_data_gives_the_same_bytes() -> None:
    figure = figure_of(estimate("llama-3.2-1b"), {})
    first, second = render(figure, "svg"), render(figure, "svg")
    assert first == second
    assert b"<dc:date>" not in first
    assert render(figure, "png") == render(figure, "png")


def test_every_ending_gives_its_format(tmp_path: Path) -> None:
    found = estimate("qwen3-0.6b")
    for ending, start in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".html", b"<!doctype html>")):
        path = tmp_path / "new" / f"picture{ending}"
        draw(found, {}, path)
        assert path.read_bytes().startswith(start)
    page = (tmp_path / "new" / "picture.html").read_text()
    assert page.count("<svg") == 1
    assert "qwen_megakernel" in page
    assert "a token reads" in page


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        draw(estimate("qwen3-0.6b"), {}, tmp_path / "file" / "picture.svg")


def test_without_matplotlib_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"monotape\[plot\]"):
        render(figure_of(estimate("qwen3-0.6b"), {}), "svg")


def test_the_readme_figure_shows_the_committed_data() -> None:
    """Drawn by `monotape plan llama-3.2-1b --reports reports --plot docs/figures/speed-of-light.svg`."""
    described = re.search(r"<dc:description>(.*?)</dc:description>", README_FIGURE.read_text(), re.DOTALL)
    assert described is not None
    figure = figure_of(estimate("llama-3.2-1b"), load_reports(ROOT / "reports"))
    assert json.loads(html.unescape(described[1])) == figure.as_json()
