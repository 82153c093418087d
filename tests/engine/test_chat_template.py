"""Chat templates: rendered as transformers renders them, and kept in their box."""

from __future__ import annotations

import collections
import datetime
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.conversations import CALL, CONVERSATIONS, TEMPLATES, TOOL, assistant, user
from monotape.engine.chat_template import ChatTemplate, Rendering, checked_message, read_template
from monotape.engine.template_process import TemplateLimits, TemplateProcess
from monotape.errors import RequestError, UsageError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """A process with short limits, for templates that misbehave. It starts within its time, also on a busy machine."""
    made = TemplateProcess(TemplateLimits(seconds=5.0, fuel=300_000, max_characters=1000, max_bytes=2**28))
    yield made
    made.close()


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatTemplate]:
    made = ChatTemplate(TEMPLATES["turn marks"], TOKENS)
    yield made
    made.close()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]], ids=["no tools", "a tool", "two tools"])
def test_rendering_is_that_of_transformers(chat: ChatTemplate, name: str, tools: list[Any] | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in CONVERSATIONS.values():
        for extra in ({}, {"enable_thinking": False, "date_string": "today"}):
            for add_generation_prompt in (True, False):
                ours = chat.render(
                    messages, Rendering(tools=tools, add_generation_prompt=add_generation_prompt,
                    chat_template=TEMPLATES[name], chat_template_kwargs=extra))  # fmt: skip
                theirs, _ = render_jinja_template(
                    [messages], tools=tools, chat_template=TEMPLATES[name],
                    add_generation_prompt=add_generation_prompt, **TOKENS, **extra,
                )  # fmt: skip
                assert ours == theirs[0]


def test_the_date_is_today(chat: ChatTemplate) -> None:
    before = datetime.date.today().isoformat()
    shown = chat.render([user("x")], Rendering(chat_template="{{ strftime_now('%Y-%m-%d') }}"))
    assert shown in (before, datetime.date.today().isoformat())


def test_json_is_as_hugging_face_writes_it(chat: ChatTemplate) -> None:
    variables = {"value": {"b": "<é&'>", "a": [1.0, None, True]}}
    shown = chat.render(
        [user("x")], Rendering(chat_template="{{ value | tojson }}", chat_template_kwargs=variables)
    )
    assert shown == '{"b": "<é&\'>", "a": [1.0, null, true]}'
    sorted_keys = "{{ value | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}"
    shown = chat.render([user("x")], Rendering(chat_template=sorted_keys, chat_template_kwargs=variables))
    assert shown == '{"a":[1.0,null,true],"b":"<\\u00e9&\'>"}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__']['__import__']('os').system('id') }}",
        "{{ strftime_now.__self__.__class__.__base__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages[0].__dict__['x'] }}",
        "{{ self._TemplateReference__context }}{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('id') }}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_of_python_or_the_disk(chat: ChatTemplate, template: str) -> None:
    with pytest.raises(RequestError, match="The chat template failed"):
        chat.render([user("x")], Rendering(chat_template=template))


def test_what_a_user_writes_is_not_a_template(chat: ChatTemplate) -> None:
    bait = "{{ 7 * 7 }}{% raw %}{# x #}"
    assert bait in chat.render([user(bait)])


LONG_LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(50) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)
ENDLESS = (
    "{% set big = '%9999999d' | format(1) %}{% for i in range(9999) %}{% set y = big | trim %}{% endfor %}"
)
BOMBS = {
    "a loop": (LONG_LOOP, "did not end within 300000 steps"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "nesting": ("{{ " + "[" * 9999 + "]" * 9999 + " }}", "recursion"),
    "a string that doubles": (DOUBLING + "{{ ns.x | length }}", "beyond its limits"),
    "a huge format": ("{{ '%3000000000d' | format(1) }}", "beyond its limits"),
    "work without steps": (ENDLESS, "beyond its limits"),
    "a huge range": ("{{ range(1000000000) | list }}", "too many"),
    "long output": ("{{ 'x' * 1001 }}", "wrote 1001 characters; at most 1000"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped_and_the_next_request_served(process: TemplateProcess, name: str) -> None:
    template, message = BOMBS[name]
    with pytest.raises(RequestError, match=message) as caught:
        process.render(template, {})
    assert "chat_template" in caught.value.hint
    assert process.render("{{ a }}", {"a": 1}) == "1"


def test_a_template_may_refuse_a_conversation(chat: ChatTemplate) -> None:
    with pytest.raises(RequestError, match=r"refuses this conversation: Roles must alternate\. Change"):
        chat.render([user("x")], Rendering(chat_template="{{ raise_exception('Roles must alternate.') }}"))


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ a.b.c }}", "{{ 'a' + none }}", "{{ x | nofilter }}", "{% if"]
)
def test_a_broken_template_is_one_clear_error(chat: ChatTemplate, template: str) -> None:
    with pytest.raises(RequestError, match="The chat template failed: ") as caught:
        chat.render([user("x")], Rendering(chat_template=template))
    assert "generate()" in caught.value.hint


def test_rendering_starts_no_thread(chat: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline is the socket's: a timer would be a thread for every request."""
    chat.start()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread} was started"))
    assert "hi" in chat.render([user("hi")])


def test_a_process_that_is_stopped_is_replaced() -> None:
    """It reads nothing: a request beyond what the socket holds cannot even be sent."""
    process = TemplateProcess(TemplateLimits(seconds=0.5))
    running, _ = process._running()
    running.send_signal(signal.SIGSTOP)
    with pytest.raises(RequestError, match="beyond its limits"):
        process.render("{{ a | length }}", {"a": "x" * 10_000_000})
    process.close()


def test_types_beside_those_of_json(chat: ChatTemplate) -> None:
    ordered = collections.OrderedDict(b=10**30, a=("x", 1.5))
    shown = chat.render(
        [user("x")], Rendering(chat_template="{{ value | tojson }}", chat_template_kwargs={"value": ordered})
    )
    assert shown == '{"b": 1000000000000000000000000000000, "a": ["x", 1.5]}'
    hangul = "\ud55c\uad6d\uc5b4 \ud7a3 \u00ed"  # bytes like those of half a surrogate pair
    assert hangul in chat.render([user(hangul)])


def test_a_process_that_died_is_replaced(chat: ChatTemplate) -> None:
    chat.start()
    running = chat._process._process
    assert running is not None
    running.kill()
    running.wait()
    assert "hi" in chat.render([user("hi")])
    chat.close()
    assert "hi" in chat.render([user("hi")])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        (["hi"], r"messages\[0\] is not a message"),
        ([user("a"), {"content": "x"}], r"messages\[1\] is not a message"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        ([{"role": "user", "content": 7}], "'int'"),
        ([assistant("", tool_calls=["x"])], "tool call"),
        ([assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])], "not JSON"),
        ([{"role": "user", "content": "x", "extra": object()}], "cannot be written as JSON"),
        ([user("\ud800")], "half of a surrogate pair"),
    ],
)
def test_messages_are_checked(chat: ChatTemplate, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        chat.render(messages)
    assert caught.value.hint


def test_text_parts_and_json_arguments_become_what_templates_expect() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert checked_message(parts, 0) == user("a\nb")
    wire = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Köln <x>", "f": 1.0}'}}
    assert checked_message(assistant(None, tool_calls=[wire]), 0)["tool_calls"] == [CALL]


def test_variables_may_not_replace_the_conversation(chat: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="'messages'"):
        chat.render([user("x")], Rendering(chat_template_kwargs={"messages": []}))
    with pytest.raises(RequestError, match="tools is not"):
        chat.render([user("x")], Rendering(tools=["f"]))  # type: ignore[list-item]


def test_a_final_message_can_be_continued(chat: ChatTemplate) -> None:
    messages = [user("count"), assistant("one, two,")]
    text = chat.render(messages, Rendering(add_generation_prompt=False, continue_final_message=True))
    assert text.endswith("<|im_start|>assistant\none, two,")
    with pytest.raises(RequestError, match="both on"):
        chat.render(messages, Rendering(continue_final_message=True))
    with pytest.raises(RequestError, match="last message"):
        chat.render(
            messages,
            Rendering(add_generation_prompt=False, continue_final_message=True, chat_template="fixed"),
        )


@pytest.mark.parametrize("begun", ["<", "e", "|im_end|", "{", "one, "])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_message_goes_on_where_it_ends_whatever_is_in_it(chat: ChatTemplate, begun: str, trim: str) -> None:
    """The end of `<` was found in the mark that ends a turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content" + trim + " }}<|im_end|>{% endfor %}"
    )
    text = chat.render(
        [user("x"), assistant(begun)],
        Rendering(add_generation_prompt=False, continue_final_message=True, chat_template=template),
    )
    assert text == "<|im_start|>user: x<|im_end|><|im_start|>assistant: " + (begun.strip() if trim else begun)


def test_a_template_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert read_template(str(file)) == "{{ messages }}"
    assert read_template("{{ x }}") == "{{ x }}"
    with pytest.raises(UsageError, match="cannot be read"):
        read_template(str(tmp_path / "missing.jinja"))
