"""Streams: text as it comes, ended early from every side, one request at a time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from engine.fake_backend import FakeBackend
from engine.scripted_model import END, GREEDY, VOCAB, ids_of, make
from engine.vocabularies import byte_level
from monotape.backends.protocol import Job, KvSequence
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.engine.turnstile import Turnstile
from monotape.errors import NumericalFault, RequestError, UsageError
from token_source import SourceGeneration
from waiting import PATIENCE_S, until


def test_deltas_add_up_to_the_answer() -> None:
    llm, _ = make("héllo wörld 😀!")
    stream = llm.stream("a", SamplingParams(max_tokens=60, logprobs=1))
    deltas = list(stream)
    answer = stream.output.outputs[0]
    assert "".join(delta.text for delta in deltas) == answer.text == stream.text == "héllo wörld 😀!"
    assert [token for delta in deltas for token in delta.token_ids] == answer.token_ids
    assert [shown for delta in deltas for shown in delta.logprobs or ()] == answer.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * len(answer.token_ids) + ["stop"]
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert next(stream, None) is None


def test_an_answer_cut_inside_a_character_ends_in_a_replacement() -> None:
    llm, _ = make("€")
    completion = llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("\ufffd", "length")


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello wor")])
def test_a_stop_string_ends_the_job_and_nothing_after_it_leaks(include: bool, text: str) -> None:
    llm, backend = make()
    params = SamplingParams(stop=[" wor"], max_tokens=60, include_stop_str_in_output=include)
    deltas = list(llm.stream("a", params))
    assert "".join(delta.text for delta in deltas) == text
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " wor")
    assert backend.generations[0].cancelled.is_set()
    assert [token for delta in deltas for token in delta.token_ids] == ids_of("hello wor")


def test_text_that_might_become_a_stop_string_is_held_back_and_released() -> None:
    llm, _ = make("hello world")
    deltas = list(llm.stream("a", SamplingParams(stop=["lo wonder"], max_tokens=60)))
    assert deltas[0].text == "hel"
    assert deltas[1].text == ""
    assert "".join(delta.text for delta in deltas) == "hello world"


def test_kv_after_a_stop_string_is_reused_by_the_next_turn() -> None:
    llm, _ = make()
    prompt = ids_of("a b c")
    llm.generate([prompt], SamplingParams(stop=[" w"], max_tokens=60))
    follow = llm.generate([[*prompt, *ids_of("hello"), 9, 9]], GREEDY)[0]
    assert follow.num_cached_tokens == len(prompt) + 1


def test_cancelling_keeps_the_text_and_the_conversation() -> None:
    llm, backend = make()
    stream = llm.stream("hello", GREEDY)
    assert next(stream).text == "hello"
    stream.cancel()
    rest = list(stream)
    assert [delta.finish_reason for delta in rest] == ["abort"]
    assert stream.output.finished
    assert (stream.output.outputs[0].finish_reason, stream.text) == ("abort", "hello")
    backend.generations[0].cancel()
    assert llm.generate("hello", GREEDY)[0].outputs[0].text == "hello world"


def test_leaving_a_stream_cancels_its_job() -> None:
    llm, backend = make()
    with llm.stream("hello", GREEDY) as stream:
        for delta in stream:
            assert delta.text == "hello"
            break
    assert backend.generations[0].finish_reason == "cancelled"
    assert (stream.output.outputs[0].finish_reason, stream.output.finished) == ("abort", True)
    assert list(stream) == []
    stream.close()
    stream.cancel()


def test_dropping_a_stream_cancels_its_job() -> None:
    llm, backend = make()
    for _ in llm.stream("hello", GREEDY):
        break
    gc.collect()
    assert backend.generations[0].finish_reason == "cancelled"
    assert llm.generate("hello", GREEDY)[0].outputs[0].text == "hello world"


@pytest.mark.parametrize("taken", [0, 1])
def test_dropping_a_stream_that_scores_frees_the_engine_at_once(taken: int) -> None:
    llm, backend = make()
    gc.disable()  # a job that held its stream would keep the next request out until garbage collection
    try:
        stream = llm.stream("hello", SamplingParams(prompt_logprobs=1, max_tokens=9))
        for _ in range(taken):
            next(stream)
        del stream
        assert llm.generate("hello", GREEDY)[0].outputs[0].text == "hello world"
    finally:
        gc.enable()
    assert [generation.finish_reason for generation in backend.generations][:-1] == ["cancelled"] * taken


def test_an_interrupted_scoring_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, backend = make()
    logits = backend.logits

    def interrupted(tokens: Sequence[int], sequence: KvSequence) -> Any:
        if sequence.length:
            raise KeyboardInterrupt
        return logits(tokens, sequence)

    monkeypatch.setattr(backend, "logits", interrupted)
    prompt = [index % 7 for index in range(71)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt], SamplingParams(prompt_logprobs=1, max_tokens=9))
    assert backend.jobs == []
    assert (
        llm.generate([prompt], SamplingParams(max_tokens=9))[0].num_cached_tokens == 0
    )  # it must not be used again


def test_an_interrupt_right_after_the_start_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, backend = make()

    def interrupted(stream: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("monotape.engine.llm.weakref.ref", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:  # which holds the stream, as an unwinding caller does
        llm.stream("hello", GREEDY)
    monkeypatch.undo()
    assert backend.generations[0].finish_reason == "cancelled"
    assert llm.generate("hello", GREEDY)[0].outputs[0].text == "hello world"
    del caught


def test_held_back_text_is_kept_when_a_stream_is_closed() -> None:
    llm, _ = make()
    stream = llm.stream("a", SamplingParams(stop=["hello there"], max_tokens=9))
    assert next(stream).text == ""
    stream.close()
    assert stream.text == "hello"


def test_an_interrupt_cancels_the_job_and_passes_on() -> None:
    llm, backend = make()
    backend.interrupt_at = 2
    stream = llm.stream("hello", GREEDY)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(delta.text for delta in stream)
    assert backend.generations[0].cancelled.is_set()
    assert (stream.text, stream.output.outputs[0].finish_reason) == ("hello w", "abort")
    backend.generations.clear()
    backend.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello world", GREEDY)
    backend.generations.clear()
    assert llm.generate("hello world", GREEDY)[0].num_cached_tokens == 0  # what it left behind is not trusted


def test_a_fault_in_a_stream_is_raised_and_ends_it() -> None:
    llm, backend = make()
    backend.fault_at = 1
    stream = llm.stream("hello", GREEDY)
    assert next(stream).text == "hello"
    with pytest.raises(NumericalFault):
        next(stream)
    assert list(stream) == []
    assert stream.output.outputs[0].finish_reason == "abort"


def test_a_stream_is_one_prompt_and_one_completion() -> None:
    llm, _ = make()
    with pytest.raises(RequestError, match="2 prompts"):
        llm.stream(["a", "b"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="n is 2"):
        llm.stream("a", SamplingParams(n=2))
    assert llm.stream("a", GREEDY).output.finished is False


def test_chat_streams_too() -> None:
    llm, _ = make()
    with llm.stream_chat([{"role": "user", "content": "a"}], GREEDY) as stream:
        assert "".join(delta.text for delta in stream) == "hello world"
    assert (stream.output.prompt or "").endswith("assistant\n")


def test_a_thread_cannot_wait_for_itself() -> None:
    llm, _ = make()
    stream = llm.stream("hello", GREEDY)
    with pytest.raises(RequestError, match="another stream of the same model open"):
        llm.generate("hello", GREEDY)
    stream.close()
    assert llm.generate("hello", GREEDY)[0].outputs[0].text == "hello world"


def test_closing_the_model_ends_an_open_stream() -> None:
    llm, backend = make()
    with llm:
        stream = llm.stream("hello", GREEDY)
        next(stream)
    assert backend.closed
    assert stream.output.outputs[0].finish_reason == "abort"


class BusyBackend(FakeBackend):
    """Its first job ends when it is cancelled, not before."""

    def __init__(self) -> None:
        super().__init__([5], vocab=VOCAB)

    def wait(self, generation: SourceGeneration, index: int) -> None:
        if index == 3 and generation is self.generations[0]:
            assert generation.cancelled.wait(PATIENCE_S), "a cancellation"
        super().wait(generation, index)


class CountingTurnstile(Turnstile):
    """Counts those that came to it."""

    entered = 0

    def enter(self) -> None:
        self.entered += 1
        super().enter()


def test_closing_the_model_refuses_the_requests_that_wait_for_their_turn() -> None:
    backend = BusyBackend()
    llm = LLM.from_parts(backend, context=97)
    llm._turnstile = turnstile = CountingTurnstile()
    ended: list[str] = []

    def work() -> None:
        try:
            ended.append(str(llm.generate([1, 2], GREEDY)[0].outputs[0].finish_reason))
        except UsageError as error:
            ended.append(error.message)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for count, thread in enumerate(threads, start=1):
        thread.start()
        until(lambda count=count: backend.jobs and turnstile.entered == count, "its turn")
    llm.close()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["This model is closed."] * 3 + ["abort"]
    assert len(backend.jobs) == 1


def test_a_request_that_begins_while_the_model_is_closed_is_cancelled() -> None:
    backend = BusyBackend()
    llm = LLM.from_parts(backend, context=97)
    closing = threading.Thread(target=llm.close)
    turnstile = llm._turnstile = CountingTurnstile()
    start = backend.start

    def start_late(job: Job, sequence: KvSequence) -> SourceGeneration:
        closing.start()
        until(lambda: turnstile.entered == 2, "the other thread")
        return start(job, sequence)

    backend.start = start_late  # type: ignore[method-assign]
    output = llm.generate([1, 2], GREEDY)[0].outputs[0]
    closing.join()
    assert output.finish_reason == "abort" and len(output.token_ids) < 40
    assert backend.closed


def test_another_thread_waits_for_an_open_stream() -> None:
    llm, backend = make()
    stream = llm.stream("hello", GREEDY)
    waiting = threading.Thread(target=lambda: llm.generate("he", GREEDY))
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    assert len(backend.jobs) == 1
    stream.close()
    waiting.join()
    assert len(backend.jobs) == 2


def test_threads_take_turns() -> None:
    """The fake backend fails when two jobs run at once, or when one gets the other's KV."""
    llm, backend = make(context=300)
    texts: list[str] = []

    def work(name: str) -> None:
        for turn in range(8):
            output = llm.generate(f"{name} {'he' * turn}", SamplingParams(max_tokens=9, temperature=0))
            texts.append(output[0].outputs[0].text)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["hello world"] * 24
    assert len(backend.jobs) == 24


def test_cancelling_from_another_thread_ends_a_long_answer() -> None:
    class SlowBackend(FakeBackend):
        def token(self, token_id: int, time_ns: int, top: int | None):  # type: ignore[no-untyped-def]
            time.sleep(0.002)
            return super().token(token_id, time_ns, top)

    vocabulary = byte_level()
    backend = SlowBackend([5], vocab=len(vocabulary.tokens), context=100_000)
    llm = LLM.from_parts(backend, context=100_000)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=None))
    started = threading.Event()

    def cancel() -> None:
        started.wait()
        stream.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    count = 0
    for _ in stream:
        count += 1
        started.set()
    canceller.join()
    assert 1 <= count < 99_000
    assert stream.output.outputs[0].finish_reason == "abort"


def test_end_token_in_the_middle_of_a_held_back_stop_string() -> None:
    llm, _ = make([*ids_of("hello"), END])
    deltas = list(llm.stream("a", SamplingParams(stop=["hello there"], max_tokens=9)))
    assert "".join(delta.text for delta in deltas) == "hello"
    assert (deltas[-1].text, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("hello", "stop", None)
