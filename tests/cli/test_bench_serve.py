"""`monotape bench serve`: its arithmetic on scripted servers of several dialects. No timing is asserted."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from monotape.cli.bench_serve import Settings, measurement, percentile, prompt, summary, table
from monotape.cli.endpoint import Chunk
from monotape.cli.main import main
from server.fake_openai import Script, running

Captured = pytest.CaptureFixture[str]


def stream(chunks: list[Chunk], usage: dict[str, Any], timings: dict[str, Any]) -> Any:
    return SimpleNamespace(started_s=10.0, chunks=chunks, usage=usage, timings=timings)


def test_what_a_client_saw_is_computed_from_arrivals() -> None:
    chunks = [
        Chunk(10.2, ""), Chunk(10.5, "a", tokens=1), Chunk(10.7, "bcd", tokens=4), Chunk(11.5, "ef", tokens=2),
        Chunk(11.6, "", finish_reason="stop"),
    ]  # fmt: skip
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
    found = measurement(stream(chunks, usage, {"decode_tokens_per_second": 8.0}), 11.7)
    assert found.ttft_s == pytest.approx(0.5)
    assert found.total_s == pytest.approx(1.7)
    assert found.client_tokens_per_second == pytest.approx(6.0)  # six tokens in the second after the first
    assert found.share == pytest.approx(0.75)
    assert found.gaps_s == pytest.approx((0.2, 0.8))
    assert found.token_gaps_s == pytest.approx((0.05,) * 4 + (0.4,) * 2)
    assert (found.tokens, found.counted_by, found.cached_tokens) == (7, "usage", 3)


def test_a_server_that_counts_nothing_is_counted_by_chunks() -> None:
    chunks = [Chunk(10.0 + step, "x") for step in range(1, 5)]
    found = measurement(stream(chunks, {}, {}), 15.0)
    assert (found.tokens, found.counted_by) == (4, "chunks")
    assert found.client_tokens_per_second == pytest.approx(1.0)
    assert found.engine_tokens_per_second is None and found.share is None
    text = table(summary("http://x", "m", Settings(4, 2, True), [found]))
    assert "4 chunks (tokens not counted)" in text
    assert "not said by the server" in text


def test_a_client_that_is_faster_than_the_engine_by_its_own_clock_gets_all_of_it() -> None:
    chunks = [Chunk(10.5, "a", tokens=1), Chunk(11.5, "b", tokens=8)]
    found = measurement(stream(chunks, {"completion_tokens": 9}, {"decode_tokens_per_second": 7.99}), 12.0)
    text = table(summary("http://x", "m", Settings(9, 2, True), [found]))
    assert "all of the engine's speed reaches the client (100.1 % by two clocks)" in text


def test_one_arrival_gives_no_speed() -> None:
    found = measurement(stream([Chunk(11.0, "all at once")], {"completion_tokens": 9}, {}), 11.0)
    assert found.client_tokens_per_second is None
    assert "one arrival only" in table(summary("http://x", "m", Settings(9, 2, True), [found]))


def test_prompts_differ_unless_a_cache_is_measured() -> None:
    fresh, same = Settings(8, 17, True), Settings(8, 17, False)
    assert prompt(fresh, 1) != prompt(fresh, 2)
    assert prompt(same, 1) == prompt(same, 2)


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.99) == 5.0


@pytest.mark.parametrize("dialect", ["monotape", "llamacpp", "plain"])
def test_any_server_can_be_measured(dialect: str, capsys: Captured) -> None:
    script = Script(dialect=dialect, tokens_per_second=2000)
    with running(script) as url:
        arguments = ["bench", "serve", "--url", url, "--requests", "3", "--max-tokens", "33", "--json"]
        assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(script.requests) == 4  # one to wake everything up
    assert len({request["messages"][0]["content"] for request in script.requests}) == 4
    assert [run["tokens"] for run in found["runs"]] == [33, 33, 33]
    engine = found["engine_tokens_per_second"]
    assert engine is None if dialect == "plain" else engine["median"] == pytest.approx(2000)
    assert found["client_tokens_per_second"]["runs"] == 3
    assert found["token_gaps_s"]["p50"] <= found["token_gaps_s"]["p99"] <= found["token_gaps_s"]["max"]


def test_a_person_gets_a_table(capsys: Captured) -> None:
    with running(Script(tokens_per_second=2000)) as url:
        assert main(["bench", "serve", "--url", url, "--requests", "1", "--max-tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert "of the engine's speed reaches the client" in out
    assert "20 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train"], "monotape bench does not understand 'train'"), (["serve", "--requests", "0"], "--requests is 0"),
        (["serve", "--url", "http://127.0.0.1:9"], "No server answers"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(arguments: list[str], complaint: str, capsys: Captured) -> None:
    assert main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err
