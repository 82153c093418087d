"""Prompts with a hole, texts that cannot fit, an event loop that goes on, and streams that say they are alive."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vocabularies import CONTROL, byte_level, changed
from monotape.engine.chat_template import Rendering
from monotape.engine.template_process import TemplateLimits
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import RequestError
from monotape.server.api_error import ApiError
from monotape.server.engine.model_source import Text
from monotape.server.http import endpoint as http
from monotape.server.http.bodies import Bodies
from monotape.server.http.replies import encode
from monotape.server.service import template_channel
from monotape.server.service.template_channel import TemplateChannel
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


async def write(work: TextWork, content: str) -> Written:
    messages = [{"role": "user", "content": content}]
    return await work.write(messages, Rendering(), ended=lambda text: f"{text}!", context=10**6)


def test_prompts_are_written_side_by_side(work: TextWork) -> None:
    async def several() -> list[Written]:
        return await asyncio.gather(*(write(work, str(number)) for number in range(9)))

    written = asyncio.run(several())
    assert [prompt.text for prompt in written] == [f"{number}!" for number in range(9)]
    assert all(len(prompt.ids) == 2 and prompt.render_ns and prompt.tokenize_ns for prompt in written)


def test_a_template_that_takes_long_holds_up_no_other_text(work: TextWork) -> None:
    assert work._channel._child is not None
    child, _ = work._channel._child

    async def both() -> list[Written]:
        child.send_signal(signal.SIGSTOP)
        waiting = [asyncio.ensure_future(write(work, str(number))) for number in range(9)]
        for _ in range(9):
            await work.encode("a text", add_special=False, context=99)
        assert not any(prompt.done() for prompt in waiting)
        child.send_signal(signal.SIGCONT)
        return await asyncio.gather(*waiting)

    assert [prompt.text for prompt in asyncio.run(both())] == [f"{number}!" for number in range(9)]


def test_the_answer_to_a_client_that_left_is_not_given_to_the_next(work: TextWork) -> None:
    assert work._channel._child is not None
    child, _ = work._channel._child

    async def two() -> Written:
        child.send_signal(signal.SIGSTOP)
        left = asyncio.ensure_future(write(work, "of one that left"))
        await asyncio.sleep(0.01)  # its request is on its way
        left.cancel()
        await asyncio.wait([left])
        child.send_signal(signal.SIGCONT)
        return await write(work, "of the next")

    assert asyncio.run(two()).text == "of the next!"
    assert work._channel._child == (child, _)  # nor was the process ended for it


def test_what_a_client_that_left_had_asked_is_remembered_on_both_sides() -> None:
    """Its long beginning is not sent a second time, although its client never read the first answer."""
    channel, long = TemplateChannel(), "word " * 5000

    def context(*more: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content} for content in (long, *more)]}

    async def two() -> str:
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        left = asyncio.ensure_future(channel.render(template, context()))
        await asyncio.sleep(0)
        left.cancel()
        return await channel.render(template, context("and more"))

    try:
        assert asyncio.run(two()) == f"{long}and more"
    finally:
        channel.close()


def test_a_template_without_end_is_stopped_on_the_loop() -> None:
    channel = TemplateChannel(TemplateLimits(seconds=0.5))
    channel.start()
    assert channel._child is not None
    child, _ = channel._child
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(RequestError, match="beyond its limits"):
        asyncio.run(channel.render("{{ a | length }}", {"a": "x" * 10_000_000}))
    assert child.poll() == -signal.SIGKILL
    channel.close()


def test_a_child_that_died_is_replaced() -> None:
    channel = TemplateChannel()
    channel.start()
    assert channel._child is not None
    first, _ = channel._child
    first.kill()
    first.wait()

    async def two() -> list[str | BaseException]:
        slow = asyncio.ensure_future(channel.render("{{ a }}", {"a": "x" * 1_000_000}))
        await asyncio.sleep(0)
        assert channel._child is not None
        channel._child[0].kill()  # under the first question, while the second waits
        return await asyncio.gather(slow, channel.render("{{ a }}", {"a": 1}), return_exceptions=True)

    try:
        slow, quick = asyncio.run(two())
        assert isinstance(slow, RequestError) and quick == "1"
    finally:
        channel.close()


def test_a_child_that_cannot_be_started_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, start = TemplateChannel(), template_channel.started
    failures = [OSError("no more processes")]

    def started(limits: TemplateLimits) -> Any:
        if failures:
            raise failures.pop()
        return start(limits)

    monkeypatch.setattr(template_channel, "started", started)

    async def three() -> list[str | BaseException]:
        asked = (channel.render("{{ a }}", {"a": number}) for number in range(3))
        return await asyncio.gather(*asked, return_exceptions=True)

    try:
        first, *others = asyncio.run(three())
        assert isinstance(first, OSError) and others == ["1", "2"]
    finally:
        channel.close()


def test_few_new_characters_need_no_thread(work: TextWork, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [f"<|im_start|>turn {number} of some length, and more of it" for number in range(99)]
    asyncio.run(write(work, "".join(turns)))
    monkeypatch.setattr(work, "elsewhere", None)
    whole = asyncio.run(write(work, "".join([*turns, "<|im_start|>a new one"])))
    assert work.tokenizer is not None
    assert list(whole.ids) == work.tokenizer.encode(whole.text, add_special=False)


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
        service: Any = SimpleNamespace(closing=asyncio.Event())
        stream = http.Stream(events(), lambda error: error.message.encode())
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
