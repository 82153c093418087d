"""A real browser for tests of the playground, and what people do with the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from server.browser_path import REQUIRED, find_browser, is_required
from server.fake_openai import Script, running
from waiting import PATIENCE_S

if not is_required():
    pytest.importorskip(
        "playwright", reason="the playwright package drives the browser: pip install '.[dev]'"
    )
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = find_browser()
assert CHROMIUM or not is_required(), f"{REQUIRED} is set, and there is no browser"
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: `make test` gets one, or install it with `apt install chromium`"
)
Open = Callable[..., Page]
expect.set_options(timeout=1000 * PATIENCE_S)  # five seconds by default


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens the page of a scripted server. Whatever the page complains about, or asks of others, is a failure."""
    with ExitStack() as stack:
        complaints: list[str] = []

        def opened(
            script: Script,
            *,
            size: tuple[int, int] = (1200, 800),
            path: str = "/",
            ready: bool = True,
            **context_settings: object,
        ) -> Page:
            url = stack.enter_context(running(script))
            context = browser.new_context(
                viewport={"width": size[0], "height": size[1]},
                permissions=["clipboard-read", "clipboard-write"],
                **context_settings,  # type: ignore[arg-type]
            )
            stack.callback(context.close)
            context.on("page", lambda page: watch(page, url, complaints))
            shown = context.new_page()
            shown.goto(url + path)
            if ready:
                expect(shown.locator("#plate")).to_contain_text(script.model)
            return shown

        yield opened
        assert complaints == []


def watch(shown: Page, url: str, complaints: list[str]) -> None:
    shown.set_default_timeout(1000 * PATIENCE_S)
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    shown.on("console", lambda message: _is_allowed(message.text, complaints))
    shown.on("request", lambda request: _stays(request.url, url, complaints))


def _stays(asked: str, url: str, complaints: list[str]) -> None:
    if not asked.startswith((url, "data:", "blob:")):
        complaints.append(f"asked for {asked}")


def _is_allowed(said: str, complaints: list[str]) -> None:
    """The page's policy is the last defence: what it stops should never have come so far."""
    if "Content Security Policy" in said or "Trusted" in said:
        complaints.append(said)


def ask(shown: Page, text: str, answers: int = 1) -> None:
    """Asks, and waits until so many answers are complete."""
    say(shown, text)
    expect(shown.locator(".strip")).to_have_count(answers)


def say(shown: Page, text: str) -> None:
    shown.fill("#prompt", text)
    shown.press("#prompt", "Enter")


def limit(shown: Page, tokens: int) -> None:
    """Sets the longest answer."""
    setting(shown, "max-tokens", str(tokens))


def setting(shown: Page, name: str, value: str) -> None:
    if shown.locator("#settings").get_attribute("open") is None:
        shown.click("#settings summary")
    shown.fill(f"#{name}", value)
    shown.click("#settings summary")
