"""The playground in a real browser: chat, stop, race, reload, keyboard, phone width, and errors shown decently.

The server is scripted (fake_openai.py), so that what must be on the page is known exactly.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monotape.server.playground import FOLDER, SCRIPTS, page
from monotape.server.playground.agents import Target, agents
from server.browsing import Open, browser, limit, needs_browser, say, visit
from server.fake_openai import Script
from server.running import scripted_server
from waiting import until

pytest.importorskip("playwright", reason="the playwright package drives the browser: pip install '.[dev]'")
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.slow

__all__ = ["browser", "visit"]  # pytest finds fixtures by their names


def test_the_page_is_one_file_that_needs_nothing_else() -> None:
    whole = page()
    assert "<!--" not in whole
    assert all(name.removesuffix(".js") for name in SCRIPTS)
    attributes = re.findall(r"\s(?:src|href|srcset|action|data)=[\"']([^\"']*)", whole.split("<script")[0])
    assert attributes and all(value.startswith(("#", "data:")) for value in attributes)
    own = [(FOLDER / name).read_text() for name in ("style.css", "markdown.css", *SCRIPTS)]
    assert not any(re.search(r"@import|url\(|importScripts|\bimport\(", text) for text in own)
    assert len(whole) < 350_000
    assert page() is whole  # put together once


def test_the_description_of_agents_cannot_end_its_script() -> None:
    inside = page().split('id="agents">')[1].split("</script>")[0]
    assert json.loads(inside)["agents"][0]["id"] == "codex"
    assert "<" not in inside


@needs_browser
def test_what_a_model_of_code_writes_is_shown_as_code(visit: Open) -> None:
    code = "    def __init__(self):\n        self.items = []\n\n    def push(self, *items):\n        pass"
    shown = visit(Script(completes="python", story=code, once=True))
    expect(shown.locator("#prompt")).to_have_attribute("placeholder", "Begin some Python")
    shown.get_by_role("button", name="class Stack:").click()
    expect(shown.locator(".message.assistant .strip")).to_contain_text("tok/s")
    expect(shown.locator(".message.assistant pre code")).to_have_count(1)
    assert shown.locator(".message.assistant pre code").inner_text().rstrip() == code
    expect(shown.locator(".message.assistant strong")).to_have_count(0)


@needs_browser
def test_chat_streams_an_answer_and_says_what_it_measured(visit: Open) -> None:
    script = Script(tokens_per_second=400, prefill_s=0.03)
    shown = visit(script)
    for fact in ("smollm2", "q8", "8,192", "scripted, 2 workers"):
        expect(shown.locator("#plate")).to_contain_text(fact)
    shown.click("#settings summary")
    shown.fill("#temperature", "0.5")
    shown.fill("#max-tokens", "77")
    shown.fill("#system", "Be brief.")
    say(shown, "Tell me about tape recorders.")
    strip = shown.locator(".message.assistant .strip")
    expect(strip).to_contain_text("400 tok/s")
    expect(strip).to_contain_text("77 tokens")
    expect(shown.locator(".dial .number")).to_have_text("400")
    expect(shown.locator(".message.assistant li").first).to_have_text("the kettle,")
    expect(shown.locator(".message.assistant pre")).to_contain_text("for page in tape:")
    expect(shown.locator(".message.assistant strong").first).to_have_text("fast")
    expect(shown.locator("#produced")).to_have_text("77")
    expect(shown.locator("#light-note")).to_contain_text("% of what this memory can do")
    (asked,) = script.requests
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["temperature"], asked["max_tokens"], asked["stream"]) == (0.5, 77, True)
    say(shown, "And now?")
    expect(shown.locator(".message.assistant .strip")).to_have_count(2)
    assert [message["role"] for message in script.requests[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert all(set(message) == {"role", "content"} for message in script.requests[1]["messages"])
    assert int(shown.locator("#cached").inner_text()) > 0


@needs_browser
@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_request_and_keeps_what_was_said(visit: Open, how: str) -> None:
    script = Script(tokens_per_second=50)
    shown = visit(script)
    limit(shown, 5000)
    say(shown, "Go on for ever.")
    expect(shown.locator(".message.assistant")).to_contain_text("A tape recorder")
    if how == "button":
        shown.click("#send:text('Stop')")
    else:
        shown.keyboard.press("Escape")
    expect(shown.locator(".strip")).to_contain_text("stopped")
    expect(shown.locator("#send")).to_have_text("Send")
    until(lambda: script.cancelled)  # the server notices with its next write
    assert (script.cancelled, script.finished) == (1, 0)
    script.tokens_per_second = 2000
    limit(shown, 31)
    say(shown, "Once more.")
    expect(shown.locator(".strip")).to_have_count(2)
    assert script.requests[1]["messages"][1]["content"].startswith("A tape recorder")


@needs_browser
def test_a_conversation_that_is_cleared_while_it_streams_stays_cleared(visit: Open) -> None:
    script = Script(tokens_per_second=50)
    shown = visit(script)
    limit(shown, 5000)
    say(shown, "Go on for ever.")
    expect(shown.locator(".message.assistant")).to_contain_text("A tape recorder")
    shown.click("#clear")
    expect(shown.locator("#send")).to_have_text("Send")
    expect(shown.locator(".message")).to_have_count(0)
    script.tokens_per_second = 2000
    limit(shown, 9)
    say(shown, "Afresh.")
    expect(shown.locator(".strip")).to_have_count(1)
    assert script.requests[-1]["messages"] == [{"role": "user", "content": "Afresh."}]


@needs_browser
def test_only_one_answer_is_made_at_a_time(visit: Open) -> None:
    shown = visit(Script(tokens_per_second=50))
    limit(shown, 5000)
    say(shown, "Go on for ever.")
    expect(shown.locator(".message.assistant")).to_contain_text("A tape recorder")
    shown.click("#tab-race")
    shown.click("#race-start")
    expect(shown.locator("#notice strong")).to_have_text("Another answer is still being made.")
    shown.click("#tab-chat")
    expect(shown.locator("#send")).to_have_text("Stop")  # the race did not end the chat
    shown.click("#send")
    expect(shown.locator(".strip")).to_contain_text("stopped")


@needs_browser
def test_the_race_replays_the_same_tokens_and_says_so(visit: Open) -> None:
    script = Script(tokens_per_second=1000)
    shown = visit(script)
    shown.click("#tab-race")
    expect(shown.locator("#lane-replay-name")).to_have_text(
        "the same tokens at 100 tok/s, not another engine"
    )
    shown.locator("#race-rate").fill("300")
    expect(shown.locator("#race-rate-text")).to_have_text("300 tok/s")
    shown.click("#race-start")
    expect(shown.locator("#verdict")).to_be_visible()
    assert shown.inner_text("#lane-live-text") == shown.inner_text("#lane-replay-text") != ""
    assert shown.inner_text("#lane-live-tokens") == shown.inner_text("#lane-replay-tokens") == "600"
    expect(shown.locator("#verdict-line")).to_contain_text("3.3 times as fast as the replay")
    expect(shown.locator("#far-live")).to_have_text("50.0 s")
    expect(shown.locator("#far-replay")).to_have_text("2 min 47 s")
    shown.locator("#race-rate").fill("100")
    expect(shown.locator("#far-replay")).to_have_text("8 min 20 s")
    expect(shown.locator("#verdict")).to_contain_text("Extrapolated")


def clocks(shown: Page) -> tuple[str, str]:
    """What the clocks of both lanes say."""
    return shown.inner_text("#lane-live-time"), shown.inner_text("#lane-replay-time")


@needs_browser
def test_the_clocks_of_a_race_agree_with_its_verdict(visit: Open) -> None:
    """Tokens that are long on their way count by the engine's clock, on both; and so does a speed chosen later."""
    shown = visit(Script(tokens_per_second=600, late_s=1.5))
    shown.click("#tab-race")
    shown.locator("#race-rate").fill("300")
    shown.click("#race-start")
    expect(shown.locator("#verdict-line")).to_contain_text("600 tokens: 1.0 s here, 2.0 s at 300 tok/s.")
    assert clocks(shown) == ("1.0", "2.0")
    expect(shown.locator("#lane-live-speed")).to_have_text("600")
    shown.locator("#race-rate").fill("150")
    expect(shown.locator("#verdict-line")).to_contain_text("600 tokens: 1.0 s here, 4.0 s at 150 tok/s.")
    assert clocks(shown) == ("1.0", "4.0")
    expect(shown.locator("#verdict-line")).to_contain_text("4.0 times as fast as the replay.")


@needs_browser
def test_a_race_that_is_stopped_has_the_verdict_of_its_clock(visit: Open) -> None:
    shown = visit(Script(tokens_per_second=200))
    shown.click("#tab-race")
    shown.click("#race-start")
    expect(shown.locator("#lane-live-text")).to_contain_text("somebody laughing")
    shown.click("#race-start:text('Stop')")
    expect(shown.locator("#verdict")).to_be_visible()
    live, replay = clocks(shown)
    tokens = shown.inner_text("#lane-live-tokens")
    expect(shown.locator("#verdict-line")).to_contain_text(
        f"{tokens} tokens: {live} s here, {replay} s at 100 tok/s. 2.0 times"
    )


@needs_browser
def test_a_race_that_is_lost_is_said_to_be_lost(visit: Open) -> None:
    shown = visit(Script(tokens_per_second=40))
    limit(shown, 41)
    shown.click("#tab-race")
    shown.click("#race-start")
    expect(shown.locator("#verdict-line")).to_contain_text("The replay is 2.5 times as fast.")
    expect(shown.locator("#race-start")).to_have_text("Race")


@needs_browser
def test_stop_also_ends_a_replay(visit: Open) -> None:
    shown = visit(Script(tokens_per_second=3000))
    shown.click("#tab-race")
    shown.locator("#race-rate").fill("30")
    shown.click("#race-start")
    expect(shown.locator("#lane-live-tokens")).to_have_text("600")
    expect(shown.locator("body")).not_to_have_class("busy")
    shown.click("#race-start:text('Stop')")
    expect(shown.locator("#lane-replay-tokens")).to_have_text("600")
    expect(shown.locator("#race-start")).to_have_text("Race")


@needs_browser
def test_a_reload_keeps_the_conversation_and_its_figures(visit: Open) -> None:
    script = Script(tokens_per_second=2000)
    shown = visit(script)
    say(shown, "Remember <b>me</b>.")
    expect(shown.locator(".strip")).to_have_count(1)
    text, strip = shown.inner_text(".message.assistant .text"), shown.inner_text(".strip span")
    shown.click("#tab-timeline")
    shown.reload()
    expect(shown.locator("#tab-timeline")).to_have_attribute("aria-selected", "true")
    expect(shown.locator("#phases")).to_contain_text("prefill")
    shown.click("#tab-chat")
    assert shown.inner_text(".message.user .text") == "Remember <b>me</b>."
    assert (shown.inner_text(".message.assistant .text"), shown.inner_text(".strip span")) == (text, strip)
    shown.click("#clear")
    expect(shown.locator(".message")).to_have_count(0)
    shown.reload()
    expect(shown.locator("#empty")).to_be_visible()


@needs_browser
def test_everything_can_be_reached_with_the_keyboard(visit: Open) -> None:
    script = Script(tokens_per_second=2000)
    shown = visit(script)
    press = shown.keyboard.press
    focused = shown.locator(":focus")
    expect(shown.locator("#prompt")).to_be_focused()
    shown.keyboard.type("first")
    press("Shift+Enter")
    shown.keyboard.type("second")
    press("Enter")
    expect(shown.locator(".strip")).to_have_count(1)
    assert script.requests[0]["messages"][0]["content"] == "first\nsecond"
    shown.locator("#tab-chat").focus()
    for name in ("race", "timeline", "context", "connect", "chat", "race"):
        press("ArrowRight")
        expect(focused).to_have_id(f"tab-{name}")
        expect(shown.locator(f"#view-{name}")).to_be_visible()
    press("End")
    expect(shown.locator("#view-connect")).to_be_visible()
    press("Tab")
    expect(focused).to_have_id("theme")
    press("Tab")
    expect(focused).to_have_text("Codex")
    press("Tab")
    press("Enter")
    expect(shown.locator("#agent h3")).to_have_text("Claude Code")
    press("/")
    expect(shown.locator("#prompt")).to_be_focused()


@needs_browser
@pytest.mark.parametrize("width", [360, 768])
def test_nothing_sticks_out_on_a_small_screen(visit: Open, width: int) -> None:
    shown = visit(
        Script(tokens_per_second=3000, model="Organisation/a-model-with-a-rather-long-name-0.5B-Instruct"),
        size=(width, 740),
    )
    say(shown, "Averyveryverylongwordwithoutanyplaceatwhichitcouldbebrokenintotwolines")
    expect(shown.locator(".strip")).to_have_count(1)
    for name in ("chat", "race", "timeline", "context", "connect"):
        shown.click(f"#tab-{name}")
        if name == "race":
            shown.locator("#race-rate").fill("300")
            shown.click("#race-start")
            expect(shown.locator("#verdict")).to_be_visible()
        assert shown.evaluate("document.documentElement.scrollWidth") <= width, name
    shown.click("#tab-chat")
    expect(shown.locator("#send")).to_be_in_viewport()


@needs_browser
@pytest.mark.parametrize(
    ("wish", "title", "detail"),
    [
        ("please refuse", "The conversation is too long.", "your prompt contains 9000 input tokens"),
        ("please be busy", "The server is busy.", "try again in 2 s"),
        ("please vanish", "The answer ended without its end.|The connection broke", "kept"),
    ],
)  # fmt: skip
def test_an_error_is_shown_and_the_question_is_not_lost(
    visit: Open, wish: str, title: str, detail: str
) -> None:
    script = Script(tokens_per_second=2000)
    shown = visit(script)
    say(shown, wish)
    expect(shown.locator("#notice strong")).to_have_text(re.compile(title))
    expect(shown.locator("#notice")).to_contain_text(detail)
    expect(shown.locator("#prompt")).to_have_value(wish)
    expect(shown.locator(".message")).to_have_count(0)
    say(shown, "And this?")
    expect(shown.locator(".strip")).to_have_count(1)
    expect(shown.locator("#notice")).to_be_hidden()
    assert [message["content"] for message in script.requests[-1]["messages"]] == ["And this?"]


@needs_browser
def test_an_answer_that_breaks_keeps_what_came(visit: Open) -> None:
    shown = visit(Script(tokens_per_second=200))
    say(shown, "please break")
    expect(shown.locator("#notice")).to_contain_text("The engine died; it is being restarted.")
    expect(shown.locator(".message.assistant")).to_contain_text("A tape recorder keeps")
    expect(shown.locator(".strip")).to_contain_text("broken off")
    shown.click("text=Dismiss")
    expect(shown.locator("#notice")).to_be_hidden()


@needs_browser
def test_a_server_that_is_gone_is_said_to_be_gone(visit: Open) -> None:
    shown = visit(Script())
    shown.route("**/v1/chat/completions", lambda route: route.abort())
    say(shown, "Anybody there?")
    expect(shown.locator("#notice strong")).to_have_text("The server does not answer.")
    expect(shown.locator("#prompt")).to_have_value("Anybody there?")


@needs_browser
def test_a_key_is_asked_for_and_stays_out_of_the_address(visit: Open) -> None:
    script = Script(key="secret", tokens_per_second=2000)
    shown = visit(script, ready=False)
    expect(shown.locator("#notice strong")).to_have_text("This server needs a key.")
    shown.fill("#notice input", "wrong")
    shown.press("#notice input", "Enter")
    expect(shown.locator("#notice strong")).to_have_text("This server needs a key.")
    shown.fill("#notice input", "secret")
    shown.press("#notice input", "Enter")
    expect(shown.locator("#plate")).to_contain_text("smollm2")
    expect(shown.locator("#notice")).to_be_hidden()
    say(shown, "Hello")
    expect(shown.locator(".strip")).to_have_count(1)
    again = visit(script, path="/#key=secret")
    assert "secret" not in again.url


@needs_browser
def test_a_browser_that_asked_for_the_key_needs_no_second_one(browser: Browser) -> None:
    """The server asks browsers for the key as a password; the page's own requests then bring it along."""
    with scripted_server(api_key="secret") as server:
        server.wait()
        context = browser.new_context(http_credentials={"username": "anyone", "password": "secret"})
        shown = context.new_page()
        complaints: list[str] = []
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.goto(server.url)
        expect(shown.locator("#plate")).to_contain_text("scripted")
        say(shown, "Hello")
        expect(shown.locator(".strip")).to_have_count(1)
        context.close()
    assert complaints == []


@needs_browser
def test_the_timeline_shows_phases_and_stages_and_can_be_saved(visit: Open, tmp_path: Path) -> None:
    shown = visit(Script(tokens_per_second=1000, prefill_s=0.05))
    say(shown, "Time yourself.")
    expect(shown.locator(".strip")).to_have_count(1)
    shown.click("#tab-timeline")
    for phase in ("render", "tokenize", "queue", "prefill", "decode", "elsewhere"):
        expect(shown.locator("#phases .gantt .name").get_by_text(phase, exact=True)).to_have_count(1)
    expect(shown.locator("#stages .gantt")).to_have_count(8)
    with shown.expect_download() as download:
        shown.click("#trace")
    download.value.save_as(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"prefill", "decode", "streaming", "qkv", "thread_name"} <= names
    assert trace["otherData"]["model"] == "smollm2"


@needs_browser
def test_drafts_are_shown_where_there_were_any(visit: Open) -> None:
    script = Script(tokens_per_second=2000, drafted=40, accepted=31)
    shown = visit(script)
    say(shown, "Hello")
    expect(shown.locator(".strip").first).to_contain_text("120 tokens, 31 from drafts")
    expect(shown.locator("#drafts")).to_have_text("31 of 40")
    expect(shown.locator("#light-note")).to_contain_text("31 tokens were drafts")
    script.drafted = script.accepted = 0
    say(shown, "And now?")
    expect(shown.locator(".strip")).to_have_count(2)
    expect(shown.locator(".strip").last).not_to_contain_text("drafts")
    expect(shown.locator("#drafts-figure")).to_be_hidden()
    expect(shown.locator("#light-note")).not_to_contain_text("drafts")


@needs_browser
def test_what_was_not_measured_is_not_shown(visit: Open) -> None:
    shown = visit(Script(timeline=False, bandwidth=None, tokens_per_second=2000))
    say(shown, "Hello")
    expect(shown.locator(".strip")).not_to_contain_text("of light")
    expect(shown.locator("#light-text")).to_have_text("\N{EN DASH}")
    expect(shown.locator("#light-note")).to_contain_text("has not been measured")
    shown.click("#tab-timeline")
    expect(shown.locator("#stages")).to_contain_text("nothing measured to show")
    shown.click("#tab-context")
    expect(shown.locator(".chart circle")).to_have_count(1)
    expect(shown.locator(".chart .ceiling")).to_have_count(0)


@needs_browser
def test_speed_against_context_is_measured_from_short_to_long(visit: Open) -> None:
    script = Script(tokens_per_second=3000, context=1500, prefill_s=0.001)
    shown = visit(script)
    shown.click("#tab-context")
    expect(shown.locator("#points")).to_contain_text("No points yet")
    shown.click("#sweep")
    expect(shown.locator("#sweep-text")).to_have_text("4 lengths measured, 32 tokens each")
    rows = shown.locator("#points tbody tr")
    expect(rows).to_have_count(4)
    contexts = [
        int(cell.replace(",", "")) for cell in shown.locator("#points td:first-child").all_inner_texts()
    ]
    assert contexts == sorted(contexts) and contexts[-1] > 1000
    assert all(len(after["messages"][0]["content"]) > len(before["messages"][0]["content"])
               for before, after in zip(script.requests, script.requests[1:], strict=False))  # fmt: skip
    expect(shown.locator(".chart circle")).to_have_count(4)
    expect(shown.locator(".chart .ceiling")).to_have_count(1)
    shown.click("#forget")
    expect(shown.locator(".chart circle")).to_have_count(0)


@needs_browser
def test_connect_copies_what_the_command_prints(visit: Open) -> None:
    shown = visit(Script(model="qwen", context=40_960))
    shown.click("#tab-connect")
    url = shown.url.rstrip("/")
    for agent in agents().values():
        shown.click(f"#agents-list >> text='{agent.title}'")
        for place, step in enumerate(agent.steps):
            shown.locator("#agent .copy").nth(place).click()
            expect(shown.locator("#agent .copy").nth(place)).to_have_text("Copied")
            copied = shown.evaluate("navigator.clipboard.readText()")
            assert copied == step.content(Target(url, "qwen", 40_960))


@needs_browser
def test_what_a_model_writes_is_text_and_never_a_part_of_the_page(visit: Open) -> None:
    story = "<img src=x onerror=alert(1)> <script>alert(2)</script> **<i>bold</i>** `<u>code</u>` [x](javascript:f()) "
    shown = visit(Script(story=story, tokens_per_second=3000))
    limit(shown, 7)
    say(shown, "<img src=x onerror=alert(4)>")
    expect(shown.locator(".strip")).to_have_count(1)
    assert "<script>alert(2)</script>" in shown.inner_text(".message.assistant .text")
    for tag in ("img", "script", "i", "u", "a"):
        expect(shown.locator(f"#log {tag}")).to_have_count(0)
