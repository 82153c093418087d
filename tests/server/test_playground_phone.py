"""The playground on a phone: the instruments fold away and the page follows the answer, as long as the reader does."""

from __future__ import annotations

import pytest

from server.browsing import Open, ask, browser, limit, needs_browser, say, visit
from server.fake_openai import Script

pytest.importorskip("playwright", reason="the playwright package drives the browser: pip install '.[dev]'")
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.slow

__all__ = ["browser", "visit"]  # pytest finds fixtures by their names

PHONE = {"size": (390, 844), "has_touch": True, "is_mobile": True}
LINES = "".join(f"\n\nParagraph {number} of a story that goes on and on." for number in range(400))
BELOW = (
    "document.querySelector('.message.assistant .text').lastElementChild.getBoundingClientRect().bottom"
    " - document.querySelector('#composer').getBoundingClientRect().top"
)


def below(shown: Page) -> float:
    """How many pixels of the newest text lie below what can be seen."""
    pixels: float = shown.evaluate(BELOW)
    return pixels


@needs_browser
def test_the_instruments_fold_away_on_a_phone(visit: Open) -> None:
    shown = visit(Script(tokens_per_second=2000), **PHONE)
    expect(shown.locator("#dial")).to_be_hidden()
    expect(shown.locator("#panel-line")).to_have_text("Instruments")
    ask(shown, "Hello")
    expect(shown.locator("#panel-line")).to_contain_text("2,000 tok/s")
    shown.tap("#panel summary")
    expect(shown.locator("#dial")).to_be_visible()
    shown.reload()
    expect(shown.locator("#dial")).to_be_visible()  # as it was left
    shown.set_viewport_size({"width": 1000, "height": 800})
    expect(shown.locator("#dial")).to_be_visible()
    expect(shown.locator("#panel-line")).to_be_hidden()
    shown.set_viewport_size({"width": 390, "height": 844})
    shown.tap("#panel summary")
    expect(shown.locator("#dial")).to_be_hidden()


@needs_browser
@pytest.mark.parametrize("device", [PHONE, {"size": (1200, 800)}], ids=["phone", "desktop"])
def test_the_page_follows_the_answer_until_the_reader_scrolls_up(
    visit: Open, device: dict[str, object]
) -> None:
    shown = visit(Script(story=LINES, once=True, tokens_per_second=400), **device)
    say(shown, "A long story, please.")
    log = shown.locator("#log")
    expect(log).to_contain_text("Paragraph 30 ")
    assert below(shown) < 200  # what came between two frames
    expect(shown.locator("#newest")).to_be_hidden()
    log.hover()
    shown.mouse.wheel(0, -300)
    expect(shown.locator("#newest")).to_be_visible()
    place = log.evaluate("log => log.scrollTop")
    expect(log).to_contain_text("Paragraph 45 ")
    assert log.evaluate("log => log.scrollTop") == place and below(shown) > 300
    shown.click("#newest")
    expect(shown.locator("#newest")).to_be_hidden()
    expect(log).to_contain_text("Paragraph 60 ")
    shown.wait_for_function("document.querySelector('#send').textContent === 'Stop'")
    assert below(shown) < 200
    shown.keyboard.press("Escape")
    expect(shown.locator(".strip")).to_have_count(1)
    assert below(shown) < 0


@needs_browser
def test_everything_can_be_reached_on_a_phone(visit: Open) -> None:
    script = Script(tokens_per_second=3000)
    shown = visit(script, **PHONE)
    limit(shown, 9)
    ask(shown, "One")
    shown.tap("#clear")
    ask(shown, "Two")
    expect(shown.locator("#conversations")).not_to_be_in_viewport()
    shown.tap("#show-list")
    expect(shown.locator("#list li")).to_have_count(2)
    expect(shown.locator("#list .delete").first).to_be_visible()  # a finger cannot hover
    shown.tap("#list >> text=One")
    expect(shown.locator(".message.user .text")).to_have_text("One")
    expect(shown.locator("#conversations")).not_to_be_in_viewport()
    for button in (".edit", ".regenerate", ".continue", "#attach", "#send", "#export summary", "#theme"):
        expect(shown.locator(button).first).to_be_in_viewport()
    shown.tap("#settings summary")
    expect(shown.locator("#send")).to_be_in_viewport()
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
