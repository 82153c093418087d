"""Prompts with a hole, texts that cannot fit, an event loop that goes on, and streams that say they are alive."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vocabularies import CONTROL, byte_level, changed
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import RequestError
from monotape.server.api_error import ApiError
from monotape.server.engine.model_source import Text
from monotape.server.http import endpoint as http
from monotape.server.http.bodies import Bodies
from monotape.server.http.replies import encode
from monotape.server.service.gate import Gate
from monotape.server.service.text_work import FILL_IN_MARKS, TextWork, Written


def text_work(*marks: str) -> TextWork:
    plain = byte_level()
    vocabulary = changed(plain, tokens=(*plain.tokens, *marks), types=(*plain.types, *[CONTROL] * len(marks)))
    from monotape.weights.checkpoint import TextAssets

    return TextWork(
        Text(Tokenizer.from_assets(TextAssets(vocabulary=vocabulary)), "{{ messages[0].content }}", {})
    )


@pytest.fixture
def work() -> Iterator[TextWork]:
    made = text_work()
    yield made
    made.close()


@pytest.mark.parametrize("marks", [FILL_IN_MARKS[0], FILL_IN_MARKS[1], FILL_IN_MARKS[5]])
def test_a_hole_is_marked_as_the_vocabulary_marks_it(marks: tuple[str, str, str, str]) -> None:
    before, after, middle, order = marks
    work = text_work(*filter(None, (before, after, middle)))
    try:
        expected = (
            f"{after}END{before}START" if order == "suffix first" else f"{before}START{after}END{middle}"
        )
        assert work.fill_in("START", "END") == expected
        ids, _ = asyncio.run(work.encode(expected, add_special=False, context=99))
        assert len(ids) == len("STARTEND") + len(
            [mark for mark in marks[:3] if mark]
        )  # marks are single tokens
    finally:
        work.close()


def test_without_marks_there_is_no_hole(work: TextWork) -> None:
    assert work.fill_in("a", "b") is None


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(work: TextWork) -> None:
    with pytest.raises(RequestError, match="This model's maximum context length is 10 tokens"):
        asyncio.run(work.encode("x" * 100_000, add_special=False, context=10))


def test_the_loop_goes_on_while_a_text_is_tokenised(work: TextWork) -> None:
    async def both() -> int:
        encoding = asyncio.ensure_future(
            work.encode("The quick brown fox. " * 40_000, add_special=False, context=10**9)
        )
        ticks = 0
        while not encoding.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks

    assert asyncio.run(both()) > 3


def test_prompts_are_written_side_by_side(work: TextWork) -> None:
    async def several() -> list[Written]:
        return await asyncio.gather(*(
            work.write(messages=[{"role": "user", "content": str(number)}], ended=lambda text: f"{text}!", context=99)
            for number in range(9)
        ))  # fmt: skip

    written = asyncio.run(several())
    assert [prompt.text for prompt in written] == [f"{number}!" for number in range(9)]
    assert all(len(prompt.ids) == 2 and prompt.render_ns and prompt.tokenize_ns for prompt in written)


def test_a_stream_that_waits_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PING_S", 0.02)
    sent: list[dict[str, Any]] = []
    waited = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body") == http.PING:
            waited.set()

    async def events() -> AsyncGenerator[bytes, None]:
        await waited.wait()
        yield b"data: 1\n\n"
        raise ApiError(500, "broken")

    async def no_handler(*_: Any) -> dict[str, Any]:
        return {}

    scope: dict[str, Any] = {"state": {}}

    async def play() -> None:
        turn = Gate(0).admit()
        turn.line_up()
        service: Any = SimpleNamespace(closing=asyncio.Event())
        stream = http.Stream(events(), lambda error: error.message.encode(), turn)
        route = http.Route("GET", "/", no_handler)
        await http.Endpoint(service, route, Bodies(1024))._send_stream(send, stream, scope)

    asyncio.run(play())
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[0] == http.PING
    assert [body for body in bodies if body != http.PING] == [b"data: 1\n\n", b"broken", b""]
    assert sent[-1]["more_body"] is False
    assert scope["state"]["error"].message == "broken"  # for the log


def test_half_a_character_does_not_break_an_answer() -> None:
    assert encode({"a\ud800": ["\udfff", 1, None]}) == b'{"a?":["?",1,null]}'


def test_errors_know_their_words() -> None:
    error = ApiError(429, "busy", code="c", headers={"retry-after": "3"})
    assert error.openai()["error"] == {
        "message": "busy",
        "type": "rate_limit_error",
        "param": None,
        "code": "c",
    }
    assert error.anthropic() == {"type": "error", "error": {"type": "rate_limit_error", "message": "busy"}}
    assert dataclasses.is_dataclass(http.Stream)
