"""Conversations on a scripted backend: rendered, answered, and computed only where they are new."""

from __future__ import annotations

import threading

import pytest

from engine.conversations import TOOL, assistant, user
from engine.fake_backend import FakeBackend
from engine.scripted_model import GREEDY, TOKENIZER, VOCAB, VOCABULARY, ids_of, make
from engine.vocabularies import byte_level
from monotape.engine.llm import LLM
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import RequestError, UsageError
from monotape.weights.checkpoint import TextAssets


def test_a_conversation_computes_only_what_is_new() -> None:
    llm, backend = make(context=400)
    first = [user("hello")]
    answer = llm.chat(first, GREEDY)[0]
    assert answer.outputs[0].text == "hello world"
    second = [*first, assistant("hello world"), user("he")]
    follow = llm.chat(second, GREEDY)[0]
    known = len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) - 1
    assert follow.num_cached_tokens == follow.stats.cached_tokens == known
    assert backend.prefilled == [len(answer.prompt_token_ids), len(follow.prompt_token_ids) - known]


def test_earlier_turns_are_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(context=4000)
    talk = [user("hello " * 100), assistant("world " * 100), user("he")]
    first = llm.chat(talk, GREEDY)[0]
    encoded, encode = 0, Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return encode(self, text, add_special=add_special)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    second = llm.chat([*talk, assistant("hello world"), user("again")], GREEDY)[0]
    assert 0 < encoded < 100 < len(first.prompt or "")
    assert TOKENIZER is not None
    assert second.prompt_token_ids == encode(TOKENIZER, second.prompt or "", add_special=False)


def test_a_request_waits_for_one_that_runs_and_computes_only_what_differs() -> None:
    llm, backend = make(context=400)
    opening = ids_of("hello world " * 9)
    answered: list[int] = []

    def ask() -> None:
        answered.append(llm.generate([*opening, 3, 4], GREEDY)[0].num_cached_tokens)

    with llm.stream([*opening, 5, 6, 7], GREEDY) as running:
        next(running)
        other = threading.Thread(target=ask)
        other.start()
        for _ in running:
            assert not answered
    other.join()
    assert answered == [len(opening)]
    assert backend.prefilled == [len(opening) + 3, 2]


def test_several_conversations_and_every_chat_argument() -> None:
    llm, backend = make(context=1500)
    outputs = llm.chat([[user("a")], [user("b")]], GREEDY)
    assert [("user\na" in (out.prompt or ""), "user\nb" in (out.prompt or "")) for out in outputs] == [
        (True, False), (False, True),
    ]  # fmt: skip
    llm.chat([user("a")], GREEDY, add_generation_prompt=False)
    assert not llm.render_chat([user("a")], add_generation_prompt=False).endswith("assistant\n")
    custom = llm.chat(
        [user("a")], GREEDY, tools=[TOOL], chat_template="{{ tools | length }}{{ mood }}",
        chat_template_kwargs={"mood": "x"},
    )  # fmt: skip
    assert custom[0].prompt == "1x"
    go_on = llm.chat(
        [user("a"), assistant("he")], GREEDY, add_generation_prompt=False, continue_final_message=True
    )
    assert (go_on[0].prompt or "").endswith("assistant\nhe")
    with pytest.raises(UsageError, match="no argument 'colour'"):
        llm.chat([user("a")], GREEDY, colour="blue")
    with pytest.raises(RequestError, match="no messages"):
        llm.chat([], GREEDY)
    assert len(backend.jobs) == 5


def test_a_chat_without_params_may_use_the_whole_context() -> None:
    llm, backend = make()
    output = llm.chat([user("a")])[0]
    assert backend.jobs[0].max_tokens == 97 - len(output.prompt_token_ids)


def test_a_chat_template_brings_its_own_bos() -> None:
    tokenizer = Tokenizer.from_assets(TextAssets(vocabulary=byte_level(add_bos=True)))
    bos = VOCABULARY.bos_id
    backend = FakeBackend([1], vocab=VOCAB)
    template = "{{ bos_token }}{{ messages[0].content }}"
    llm = LLM.from_parts(backend, context=97, tokenizer=tokenizer, chat_template=template)
    assert llm.chat([user("hello")], GREEDY)[0].prompt_token_ids.count(bos or 0) == 1
    assert llm.generate("hello", GREEDY)[0].prompt_token_ids.count(bos or 0) == 1
    assert llm.generate("<|bos|>hello", GREEDY)[0].prompt_token_ids.count(bos or 0) == 1
    without = llm.chat([user("hello")], GREEDY, chat_template="{{ messages[0].content }}")
    assert bos not in without[0].prompt_token_ids


def test_a_model_without_a_template_says_what_to_do() -> None:
    assert make()[0].has_chat_template
    llm, _ = make(chat_template=None)
    assert not llm.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        llm.chat([user("a")], GREEDY)
    assert "generate()" in caught.value.hint
    assert llm.chat([user("a")], GREEDY, chat_template="{{ messages[0].content }}")[0].prompt == "a"
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([user("a")], GREEDY)


def test_a_given_template_replaces_the_models_own() -> None:
    llm, _ = make(config={"chat_template": "{{ messages[0].content }}!"})
    assert llm.render_chat([user("a")]) == "a!"
