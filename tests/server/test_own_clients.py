"""Monotape's own clients against its own server with a real model: the playground, chat, connect and bench."""

from __future__ import annotations

import io
import json

import pytest

from monotape.cli.main import main
from server.browsing import CHROMIUM, needs_browser
from server.running import RunningServer
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow
Captured = pytest.CaptureFixture[str]


def test_chat_keeps_a_conversation_and_reuses_its_kv(
    smollm2: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n"))
    arguments = ["chat", "--url", smollm2.url, "--temperature", "0", "--max-tokens", "24", "--stats"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    _, second = [line for line in captured.err.splitlines() if "tok/s in the engine" in line]
    assert "cached" in second


def test_a_model_that_is_not_there_is_refused(smollm2: RunningServer, capsys: Captured) -> None:
    assert main(["chat", "--url", smollm2.url, "--model", "gpt-nothing"]) == 2
    assert "has no model 'gpt-nothing'" in capsys.readouterr().err


def test_connect_asks_the_server(smollm2: RunningServer, capsys: Captured) -> None:
    context = smollm2.get("/v1/models").json()["data"][0]["max_model_len"]
    assert main(["connect", "opencode", "--url", smollm2.url, "--json"]) == 0
    settings = json.loads(json.loads(capsys.readouterr().out)["steps"][0]["content"])
    (model,) = settings["provider"]["monotape"]["models"].values()
    assert model["limit"]["context"] == context


def test_bench_measures_the_engine_and_the_client(smollm2: RunningServer, capsys: Captured) -> None:
    arguments = ["bench", "serve", "--url", smollm2.url, "--requests", "2", "--max-tokens", "17", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["tokens"] for run in found["runs"]] == [17, 17]
    assert found["engine_tokens_per_second"]["median"] > 0
    assert found["share"]["median"] > 0
    assert all(run["prompt_tokens"] > 64 for run in found["runs"])


@needs_browser
def test_the_playground_shows_what_the_server_measured(smollm2: RunningServer) -> None:
    from playwright.sync_api import expect, sync_playwright

    info = smollm2.get("/monotape/info").json()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page()
        shown.set_default_timeout(1000 * PATIENCE_S)
        complaints: list[str] = []
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        shown.goto(smollm2.url)
        for fact in (info["model"], info["dtype"], f"{info['context']:,}", info["backend"]):
            expect(shown.locator("#plate")).to_contain_text(fact)
        shown.click("#settings summary")
        shown.fill("#temperature", "0")
        shown.fill("#max-tokens", "40")
        shown.fill("#prompt", "What is the capital of France?")
        shown.press("#prompt", "Enter")
        expect(shown.locator(".strip")).to_have_count(1, timeout=1000 * PATIENCE_S)
        expect(shown.locator(".message.assistant")).to_contain_text("Paris")
        assert 0 < int(shown.inner_text("#produced")) <= 40
        assert float((shown.text_content(".dial .number") or "").replace(",", "")) > 0
        shown.click("#tab-timeline")
        for phase in ("render", "tokenize", "prefill", "decode"):
            expect(shown.locator("#phases .name").get_by_text(phase, exact=True)).to_have_count(1)
        shown.click("#tab-chat")
        shown.fill("#max-tokens", "4000")
        shown.fill("#prompt", "Write a very long story about a tape recorder.")
        shown.press("#prompt", "Enter")
        expect(shown.locator(".message.assistant").nth(1).locator(".text")).not_to_be_empty(
            timeout=1000 * PATIENCE_S
        )
        shown.keyboard.press("Escape")
        expect(shown.locator(".strip").nth(1)).to_contain_text("stopped")
        browser.close()
    assert complaints == []
    assert smollm2.say("Hello", max_tokens=3)  # the engine is free again
