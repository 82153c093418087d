"""Both ends of a template's process remember the latest turn: little is sent, and every text is the whole one."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.conversations import CALL, TEMPLATES, assistant, user
from monotape.engine import template_child
from monotape.engine.chat_template import ChatTemplate, Rendering
from monotape.engine.template_memory import TemplateMemory, packed
from monotape.errors import RequestError

TURNS = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


class BothEnds:
    """The memories of the two processes, with what is sent between them."""

    def __init__(self) -> None:
        self.here, self.there = TemplateMemory(), template_child._Memory()
        self.sent = self.received = 0  # bytes of the latest question and answer

    def messages(self, context: dict[str, Any]) -> Any:
        """Those that the child renders."""
        request = self.here.request(packed("a template", context))
        self.sent = len(request)
        assert struct.unpack_from(">I", request)[0] == len(request) - 4
        received = self.there.request(request[4:])
        assert received["template"] == "a template"
        return received["context"]["messages"]

    def text(self, answered: str) -> str:
        """What this end makes of the child's answer."""
        reply = self.there.reply({"text": answered})
        self.received = len(reply)
        assert reply[:1] == b"T"
        return self.here.text(reply[1:])


contents = st.lists(st.sampled_from(["", "a", "b", "aaaa", "é", "🙂", "한"]), max_size=6)


@given(st.lists(contents, max_size=6))
def test_every_question_and_every_answer_arrives_whole(turns: list[list[str]]) -> None:
    ends = BothEnds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_child, "_STEP", 2)
        for turn in turns:
            asked = [user(content) for content in turn]
            assert ends.messages({"messages": asked}) == asked
            assert ends.text("".join(turn)) == "".join(turn)


def test_only_what_is_new_is_sent() -> None:
    ends, talk = BothEnds(), [user("a long way " * 3000), assistant("to go " * 3000)]
    text = "".join(message["content"] for message in talk)
    sizes = []
    for _ in range(3):
        assert ends.messages({"messages": talk}) == talk
        assert ends.text(text) == text
        sizes.append((ends.sent, ends.received))
        talk, text = [*talk, user("on")], text + "on"
    assert min(sizes[0]) > 50_000
    assert max(sizes[1][0], sizes[2][0]) < 200 and max(sizes[1][1], sizes[2][1]) < 2 * template_child._STEP


def test_equal_messages_are_equal_bytes_whatever_else_refers_to_them() -> None:
    content = "".join(["a text ", "of its own"])
    twice = {"role": "user", "content": content, "name": content}
    apart = {"role": "user", "content": content, "name": "".join(["a text ", "of its own"])}
    assert packed("", {"messages": [twice]}).messages == packed("", {"messages": [apart]}).messages


@pytest.fixture
def chat() -> Any:
    made = ChatTemplate(TURNS, {})
    yield made
    made.close()


def test_a_message_that_its_owner_changed_is_sent_again(chat: ChatTemplate) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    talk = [user("w?"), assistant("", tool_calls=[call])]
    shown = Rendering(chat_template=TEMPLATES["tools and thoughts"])
    assert "Rome" in chat.render(talk, shown)
    call["function"]["arguments"]["city"] = "Oslo"
    text = chat.render(talk, shown)
    assert "Oslo" in text and "Rome" not in text


def test_a_number_is_no_truth_value(chat: ChatTemplate) -> None:
    """Although Python finds them equal."""
    form = Rendering(chat_template="{{ messages[0].flag }}")
    shown = [chat.render([{**user("x"), "flag": flag}], form) for flag in (1, True, 1.0)]
    assert len(set(shown)) == 3


def test_after_an_error_and_after_another_process_texts_are_whole(chat: ChatTemplate) -> None:
    long = "word " * 2000
    talk = [user(long), assistant(long)]
    whole = f"[{long}][{long}]"
    assert chat.render(talk) == whole
    with pytest.raises(RequestError, match="failed"):
        chat.render([*talk, user("x")], Rendering(chat_template="{{ a.b.c }}"))
    assert chat.render([*talk, user("x")]) == f"{whole}[x]"
    running = chat._process._process
    assert running is not None
    running.kill()
    running.wait()
    assert chat.render([*talk, user("x"), user("y")]) == f"{whole}[x][y]"
    assert chat.render(talk[:1]) == f"[{long}]"
