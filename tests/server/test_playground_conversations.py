"""Conversations of the playground in a real browser: kept at once, listed, edited, continued, exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from server.browsing import Open, ask, browser, limit, needs_browser, say, setting, visit
from server.fake_openai import Script

pytest.importorskip("playwright", reason="the playwright package drives the browser: pip install '.[dev]'")
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.slow

__all__ = ["browser", "visit"]  # pytest finds fixtures by their names

STORY = "One two three four five six seven eight nine ten."


def contents(script: Script) -> list[str]:
    """What the last request said, message after message."""
    return [message["content"] for message in script.requests[-1]["messages"]]


def titles(shown: Page) -> list[str]:
    return shown.locator("#list .open span").all_inner_texts()


def download(shown: Page, button: str, folder: Path) -> tuple[str, str]:
    """The name and the text of the file that a button saves."""
    with shown.expect_download() as waiting:
        shown.click(button)
    waiting.value.save_as(folder / "saved")
    return waiting.value.suggested_filename, (folder / "saved").read_text()


@needs_browser
def test_a_reload_in_the_middle_of_an_answer_loses_nothing(visit: Open) -> None:
    script = Script(tokens_per_second=60)
    shown = visit(script)
    limit(shown, 5000)
    say(shown, "Go on for ever.")
    expect(shown.locator(".message.assistant")).to_contain_text("The ribbon does not know")
    before = shown.inner_text(".message.assistant .text")
    shown.reload()
    expect(shown.locator(".message.user .text")).to_have_text("Go on for ever.")
    assert before.strip() in shown.inner_text(".message.assistant .text")
    expect(shown.locator(".strip")).to_contain_text("interrupted by a reload")
    expect(shown.locator("#max-tokens")).to_have_value("5000")
    script.tokens_per_second = 3000
    limit(shown, 9)
    ask(shown, "Goes on?", 2)
    assert contents(script)[0] == "Go on for ever." and before[:20] in contents(script)[1]


@needs_browser
def test_a_reload_while_the_prompt_is_read_keeps_the_question(visit: Open) -> None:
    script = Script(prefill_s=30)
    shown = visit(script)
    say(shown, "A question that takes long to read.")
    expect(shown.locator(".reading")).to_be_visible()
    shown.reload()
    expect(shown.locator(".message.user .text")).to_have_text("A question that takes long to read.")
    expect(shown.locator(".message.assistant")).to_have_count(0)
    script.prefill_s = 0
    shown.click(".unanswered")
    expect(shown.locator(".strip")).to_have_count(1)
    expect(shown.locator(".unanswered")).to_have_count(0)
    assert contents(script) == ["A question that takes long to read."]


@needs_browser
def test_what_is_typed_and_set_is_kept_as_it_is_typed(visit: Open) -> None:
    shown = visit(Script())
    shown.fill("#prompt", "Half a questi")
    shown.set_input_files("#file-picker", _file("notes.txt", b"some notes"))
    expect(shown.locator("#files .chip")).to_have_count(1)
    setting(shown, "system", "Be brief.")
    setting(shown, "top-p", "0.9")
    shown.reload()
    expect(shown.locator("#prompt")).to_have_value("Half a questi")
    expect(shown.locator("#files .chip")).to_contain_text("notes.txt")
    expect(shown.locator("#system")).to_have_value("Be brief.")
    expect(shown.locator("#top-p")).to_have_value("0.9")
    expect(shown.locator("#settings summary")).to_have_text("Settings (2)")


@needs_browser
def test_conversations_are_listed_renamed_deleted_and_brought_back(visit: Open) -> None:
    script = Script(story=STORY, once=True, tokens_per_second=3000)
    shown = visit(script, size=(1440, 900))
    expect(shown.locator("#list-empty")).to_be_visible()
    for question in ("About kettles", "About chairs"):
        shown.click("#new")
        ask(shown, question)
    assert titles(shown) == ["About chairs", "About kettles"]
    shown.click("#list >> text=About kettles")
    expect(shown.locator(".message.user .text")).to_have_text("About kettles")
    ask(shown, "More of them", 2)
    assert contents(script) == ["About kettles", STORY, "More of them"]
    assert titles(shown) == ["About kettles", "About chairs"]  # the newest first
    shown.reload()
    expect(shown.locator(".message")).to_have_count(4)
    shown.hover("#list li:nth-child(2)")
    shown.click("#list li:nth-child(2) .rename")
    shown.keyboard.type("Seats")
    shown.keyboard.press("Enter")
    assert "Seats" in titles(shown)
    shown.hover("#list li:has-text('About kettles')")
    shown.click("#list li:has-text('About kettles') .delete")
    expect(shown.locator("#list li")).to_have_count(1)
    expect(shown.locator("#empty")).to_be_visible()
    shown.click("#notice >> text=Undo")
    expect(shown.locator(".message")).to_have_count(4)
    assert sorted(titles(shown)) == ["About kettles", "Seats"]
    shown.reload()
    assert sorted(titles(shown)) == ["About kettles", "Seats"]


@needs_browser
def test_a_long_question_is_a_title_that_says_it_is_cut(visit: Open) -> None:
    """Titles ended in the middle of a word, as if that were all."""
    shown = visit(Script(story=STORY, once=True, tokens_per_second=3000), size=(1440, 900))
    ask(shown, "Why is it that " + "kettles " * 20)
    shown.click("#new")
    ask(shown, "k" * 100)
    assert titles(shown) == ["k" * 79 + "…", "Why is it that " + "kettles " * 7 + "kettles…"]


@needs_browser
def test_a_deleted_conversation_does_not_come_back_with_its_answer(visit: Open) -> None:
    shown = visit(Script(tokens_per_second=60), size=(1440, 900))
    limit(shown, 5000)
    say(shown, "Go on for ever.")
    expect(shown.locator(".message.assistant")).to_contain_text("A tape recorder")
    shown.hover("#list li")
    shown.click("#list .delete")
    expect(shown.locator("#send")).to_have_text("Send")
    expect(shown.locator("#list li")).to_have_count(0)
    shown.reload()
    expect(shown.locator("#list-empty")).to_be_visible()


@needs_browser
def test_two_tabs_do_not_write_over_each_other(visit: Open) -> None:
    script = Script(story=STORY, once=True, tokens_per_second=3000)
    first = visit(script, size=(1440, 900))
    ask(first, "From the first tab")
    second = first.context.new_page()
    second.goto(first.url)
    expect(second.locator("#empty")).to_be_visible()  # another tab begins another conversation
    second.click("#list >> text=From the first tab")
    expect(second.locator(".message")).to_have_count(2)
    script.tokens_per_second = 8
    say(first, "Slowly")
    expect(first.locator(".message.assistant >> nth=1")).to_contain_text("One")
    script.tokens_per_second = 3000
    say(second, "Quickly")
    for tab in (first, second):
        expect(tab.locator("#send")).to_have_text("Send")
        expect(tab.locator(".message.assistant .text").last).to_have_text(STORY)
    expect(second.locator(".message.user .text").last).to_have_text("Quickly")
    found = first.evaluate(
        "Object.keys(localStorage).filter(k => k.startsWith('monotape.conversation.'))"
        ".map(k => JSON.parse(localStorage[k]).nodes.map(n => n.content))"
    )
    said = {text for conversation in found for text in conversation}
    assert {"From the first tab", "Slowly", "Quickly"} <= said
    first.wait_for_function(  # an answer is kept a moment after it has come
        "story => Object.keys(localStorage).filter(k => k.startsWith('monotape.conversation.'))"
        ".flatMap(k => JSON.parse(localStorage[k]).nodes).filter(n => n.content === story).length >= 3",
        arg=STORY,
    )


@needs_browser
def test_a_question_can_be_edited_and_both_versions_stay(visit: Open) -> None:
    script = Script(story=STORY, once=True, tokens_per_second=3000)
    shown = visit(script)
    ask(shown, "First question")
    ask(shown, "Second question", 2)
    shown.click(".message.user .edit >> nth=0")
    expect(shown.locator(".editor textarea")).to_be_focused()
    shown.keyboard.press("Escape")
    expect(shown.locator(".editor")).to_have_count(0)
    shown.click(".message.user .edit >> nth=0")
    shown.fill(".editor textarea", "First, but better")
    shown.keyboard.press("Enter")
    expect(shown.locator(".message.user .text")).to_have_text(["First, but better"])
    expect(shown.locator(".strip")).to_have_count(1)
    assert contents(script) == ["First, but better"]
    expect(shown.locator(".message.user .versions")).to_contain_text("2 / 2")
    shown.click("[aria-label='Earlier version']")
    expect(shown.locator(".message.user .text")).to_have_text(["First question", "Second question"])
    shown.reload()
    expect(shown.locator(".message.user .text")).to_have_text(["First question", "Second question"])


@needs_browser
def test_another_answer_leaves_the_first_one_there(visit: Open) -> None:
    script = Script(story="The first.", once=True, tokens_per_second=3000)
    shown = visit(script)
    ask(shown, "Say something")
    script.story = "The second."
    shown.click(".regenerate")
    expect(shown.locator(".message.assistant .text")).to_have_text("The second.")
    expect(shown.locator(".versions")).to_contain_text("2 / 2")
    assert contents(script) == ["Say something"]
    shown.click("[aria-label='Earlier version']")
    expect(shown.locator(".message.assistant .text")).to_have_text("The first.")
    ask(shown, "And then?", 2)
    assert contents(script) == ["Say something", "The first.", "And then?"]
    script.story = "please"
    shown.route("**/v1/chat/completions", lambda route: route.abort())
    shown.click(".regenerate >> nth=0")
    expect(shown.locator("#notice strong")).to_have_text("The server does not answer.")
    expect(shown.locator(".message.assistant .text").first).to_have_text("The first.")  # not lost by trying


@needs_browser
def test_an_answer_that_was_cut_off_goes_on_where_it_ended(visit: Open) -> None:
    script = Script(story=STORY, once=True, tokens_per_second=3000)
    shown = visit(script)
    limit(shown, 4)
    ask(shown, "Count")
    expect(shown.locator(".message.assistant .text")).to_have_text("One two three four")
    limit(shown, 100)
    shown.click(".continue")
    expect(shown.locator(".message.assistant .text")).to_have_text(STORY)
    expect(shown.locator(".continue")).to_have_count(0)  # it has come to its end
    request = script.requests[-1]
    assert request["messages"][-1] == {"role": "assistant", "content": "One two three four"}
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)
    shown.reload()
    expect(shown.locator(".message.assistant .text")).to_have_text(STORY)


@needs_browser
def test_conversations_are_exported_and_imported(visit: Open, tmp_path: Path) -> None:
    script = Script(story=STORY, once=True, tokens_per_second=3000)
    shown = visit(script, size=(1440, 900))
    expect(shown.locator("#export-all")).to_be_disabled()
    shown.set_input_files("#file-picker", _file("a.txt", b"```\ninside\n```"))
    ask(shown, "What is in it?")
    shown.click("#export summary")
    name, text = download(shown, "#export-markdown", tmp_path)
    assert name == "what-is-in-it.md"
    assert "# What is in it?" in text and "````\n```\ninside\n```\n````" in text and STORY in text
    expect(shown.locator("#export-json")).to_be_hidden()  # the menu closes behind a choice
    shown.click("#export summary")
    name, text = download(shown, "#export-json", tmp_path)
    saved = json.loads(text)
    assert name == "what-is-in-it.json" and saved["model"] == script.model
    assert [message["content"] for message in saved["messages"]] == ["What is in it?", STORY]
    assert saved["messages"][1]["figures"]["produced"] == 10
    _, archive = download(shown, "#export-all", tmp_path)
    shown.hover("#list li")
    shown.click("#list .delete")
    said = {"role": "user", "content": "x", "parent": -1}
    broken = ([{"role": 7}], [{**said, "parent": 3}], [{**said, "files": "no list"}], [])
    archives = [{"kind": "monotape conversations", "conversations": [{"nodes": nodes}]} for nodes in broken]
    for bad in (b"no json", *(json.dumps(one).encode() for one in archives)):
        shown.set_input_files("#import-picker", _file("bad.json", bad))
        expect(shown.locator("#notice strong")).to_have_text("Nothing was imported.")
        shown.click("text=Dismiss")
    shown.set_input_files("#import-picker", _file("all.json", archive.encode()))
    expect(shown.locator("#notice strong")).to_have_text("Imported.")
    shown.click("#list >> text=What is in it?")
    expect(shown.locator(".message.assistant .text")).to_have_text(STORY)
    odd = json.loads(archive)
    odd["conversations"][0]["title"] = "Odd figures"
    odd["conversations"][0]["nodes"][1]["summary"]["figures"] = {"speed": "<b>", "produced": 3}
    shown.set_input_files("#import-picker", _file("odd.json", json.dumps(odd).encode()))
    shown.click("#list >> text=Odd figures")
    expect(shown.locator(".strip .told")).to_have_text("3 tokens")


@needs_browser
def test_text_files_go_along_with_a_question(visit: Open) -> None:
    script = Script(story=STORY, once=True, tokens_per_second=3000)
    shown = visit(script)
    shown.set_input_files("#file-picker", [*_file("a.py", b"x = 1\n"), *_file("b.txt", "ü".encode("utf-16"))])
    expect(shown.locator("#files .chip")).to_have_count(2)
    shown.set_input_files("#file-picker", _file("picture.png", b"\x89PNG\x0d\x0a\x1a\x0a\x00\x00"))
    expect(shown.locator("#notice")).to_contain_text("picture.png is not a text file.")
    shown.set_input_files("#file-picker", _file("large.csv", b"1," * 600_000))
    expect(shown.locator("#notice")).to_contain_text("large.csv has 1.2 MB. A file may have up to 1.0 MB.")
    expect(shown.locator("#files .chip")).to_have_count(2)
    ask(shown, "Explain these.")
    assert contents(script) == ["a.py:\n```\nx = 1\n```\n\nb.txt:\n```\nü\n```\n\nExplain these."]
    expect(shown.locator("#files")).to_be_hidden()
    expect(shown.locator(".message.user .chip")).to_have_text(["a.py6 B", "b.txt2 B"])
    shown.click(".message.user .attachment summary >> nth=0")
    expect(shown.locator(".message.user .attachment pre").first).to_have_text("x = 1")
    shown.set_input_files("#file-picker", _file("only.txt", b"alone"))
    shown.click("[aria-label='Remove only.txt']")
    expect(shown.locator("#files")).to_be_hidden()


@needs_browser
def test_every_sampling_field_reaches_the_server(visit: Open) -> None:
    script = Script(story=STORY, once=True, tokens_per_second=3000)
    shown = visit(script)
    wanted = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": -0.5, "frequency_penalty": 0.5, "max_tokens": 50, "min_tokens": 2, "seed": 7,
    }  # fmt: skip
    shown.click("#settings summary")
    written = {**wanted, "stop": "END\n###", "stop_token_ids": "2, 7", "logit_bias": "15: -5, 7: 2.5"}
    for name, value in written.items():
        shown.fill(f"[data-setting={name}]", str(value))
    shown.check("#ignore-eos")
    ask(shown, "With everything")
    expected = {**wanted, "stop": ["END", "###"], "stop_token_ids": [2, 7], "ignore_eos": True}
    expected["logit_bias"] = {"15": -5, "7": 2.5}
    assert {name: script.requests[-1].get(name) for name in expected} == expected
    shown.click("#settings-reset")
    ask(shown, "With nothing", 2)
    assert not set(expected) & set(script.requests[-1])


@needs_browser
@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("temperature", "9", "Temperature must be a number from 0 to 2."),
        ("top-k", "2.5", "Top k must be a whole number from -1 on."),
        ("logit-bias", "lots", '"lots" is no bias. Write them as 15: -5, 7: 2.'),
        ("stop-token-ids", "2, x", '"x" is no token id.'),
    ],
)
def test_a_setting_that_makes_no_sense_is_explained(
    visit: Open, name: str, value: str, sentence: str
) -> None:
    script = Script()
    shown = visit(script)
    setting(shown, name, value)
    say(shown, "Keep me")
    expect(shown.locator("#notice strong")).to_have_text("A setting makes no sense.")
    expect(shown.locator("#notice")).to_contain_text(sentence)
    expect(shown.locator("#prompt")).to_have_value("Keep me")
    assert script.requests == []


@needs_browser
def test_the_theme_is_chosen_and_kept(visit: Open) -> None:
    shown = visit(Script(), color_scheme="light")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = shown.evaluate(paper)
    expect(shown.locator("#theme")).to_have_attribute("title", "Theme: as the system")
    shown.emulate_media(color_scheme="dark")
    dark = shown.evaluate(paper)
    assert dark != light
    shown.click("#theme")
    expect(shown.locator("#theme")).to_have_attribute("title", "Theme: light")
    assert shown.evaluate(paper) == light
    shown.click("#theme")
    shown.emulate_media(color_scheme="light")
    assert shown.evaluate(paper) == dark
    shown.reload()
    assert shown.evaluate(paper) == dark
    shown.click("#theme")
    assert shown.evaluate(paper) == light


@needs_browser
def test_a_full_storage_is_said_and_the_page_goes_on(visit: Open) -> None:
    shown = visit(Script(story=STORY, once=True, tokens_per_second=3000))
    shown.evaluate(
        "() => { const keep = Storage.prototype.setItem; Storage.prototype.setItem = function (name, value) {"
        " if (name.includes('conversation')) throw new DOMException('full', 'QuotaExceededError');"
        " return keep.call(this, name, value); }; }"
    )
    ask(shown, "Hello")
    expect(shown.locator("#notice strong")).to_have_text("This browser keeps no more.")
    expect(shown.locator(".message.assistant .text")).to_have_text(STORY)


@needs_browser
def test_the_prompt_is_seen_to_be_read(visit: Open) -> None:
    """A busy browser may miss some of the states, which last a quarter of the time."""
    script = Script(prefill_s=8, prefill_told_s=60, tokens_per_second=3000)
    shown = visit(script)
    say(shown, "word " * 996)
    reading = shown.locator(".reading")
    expect(reading).to_contain_text("reading the prompt: 1,000 tokens …")
    later = "|".join(
        (
            "250 of 1,000 tokens, about (50|45)",
            "500 of 1,000 tokens, about 30",
            "750 of 1,000 tokens, about 15",
        )
    )
    expect(reading).to_contain_text(re.compile(f"reading the prompt: ({later}) s left"))
    expect(reading.locator("[role=progressbar]")).to_have_attribute(
        "aria-valuenow", re.compile("^(25|50|75)$")
    )
    expect(shown.locator(".strip")).to_have_count(1)
    expect(reading).to_have_count(0)


def _file(name: str, content: bytes) -> list[dict[str, object]]:
    return [{"name": name, "mimeType": "application/octet-stream", "buffer": content}]
