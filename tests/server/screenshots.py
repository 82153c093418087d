"""Takes the pictures of the playground that the documentation shows, from a running server.

PYTHONPATH=tests python tests/server/screenshots.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from server.browser_path import find_browser

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
WAIT_MS = 600_000
DESK, PHONE = (1280, 800), (390, 844)
QUESTIONS = ("Why is the sky blue?", "Write a short Python function that adds two numbers, and explain it.")


def open_page(browser: Browser, url: str, size: tuple[int, int], scheme: str, **device: bool) -> Page:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        **device,  # type: ignore[arg-type]
    )
    shown = context.new_page()
    shown.set_default_timeout(WAIT_MS)
    shown.goto(url)
    shown.wait_for_selector("#plate span")
    shown.click("#settings summary")
    shown.fill("#temperature", "0")
    shown.fill("#max-tokens", "160")
    shown.click("#settings summary")
    return shown


def talk(shown: Page) -> None:
    for number, question in enumerate(QUESTIONS, start=1):
        shown.fill("#prompt", question)
        shown.press("#prompt", "Enter")
        shown.locator(".strip").nth(number - 1).wait_for()
    shown.evaluate("document.activeElement.blur()")


def save(shown: Page, name: str) -> None:
    shown.mouse.move(0, 0)
    shown.screenshot(path=FIGURES / f"playground-{name}.png")


def take(browser: Browser, url: str) -> None:
    shown = open_page(browser, url, DESK, "light")
    talk(shown)
    save(shown, "chat")
    shown.click("#settings summary")
    save(shown, "settings")
    shown.click("#settings summary")
    shown.click("#tab-race")
    shown.click("#race-start")
    shown.locator("#verdict").wait_for()
    save(shown, "race")
    shown.click("#tab-timeline")
    save(shown, "timeline")
    shown.click("#tab-context")
    shown.click("#sweep")
    shown.locator("#sweep-text", has_text="measured").wait_for()
    save(shown, "context")
    dark = open_page(browser, url, DESK, "dark")
    talk(dark)
    save(dark, "dark")
    dark.click("#tab-connect")
    save(dark, "connect")
    phone = open_page(browser, url, PHONE, "light", has_touch=True, is_mobile=True)
    talk(phone)
    save(phone, "phone")
    phone.click("#show-list")
    save(phone, "phone-list")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="where the server is")
    options = parser.parse_args()
    FIGURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        take(browser, options.url)
        browser.close()


if __name__ == "__main__":
    main()
