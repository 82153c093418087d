"""A request inside the server: it is read once, its SamplingParams are made once, and they travel as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monotape.engine.config import EngineConfig
from monotape.engine.sampling_params import SamplingParams
from monotape.server.api_error import ApiError
from monotape.server.apis.chat import chat_completions
from monotape.server.apis.completions import completions
from monotape.server.apis.messages import messages
from monotape.server.apis.responses import responses
from monotape.server.config import ServerConfig
from monotape.server.conversation import conversation
from monotape.server.engine import wire
from monotape.server.frames import HEADER, frame
from monotape.server.http.endpoint import Handler, Stream
from monotape.server.requests.anthropic import InputMessage, MessagesRequest
from monotape.server.requests.openai import ChatRequest, CompletionRequest, ResponseFormat
from monotape.server.requests.responses import ResponsesRequest
from monotape.server.service.metrics import Metrics
from monotape.server.service.service import Service
from monotape.server.service.text_work import TextWork
from server import scripted
from server.running import RunningServer

SAID = [{"role": "user", "content": "Hello"}]
STATS = wire.Stats(3, 0, 1, 1000, 1000, None, 100)


class Run:
    """A completion that ends at once."""

    done = wire.Done(1, "ok", "stop", None, 0, STATS)

    async def __aiter__(self) -> AsyncIterator[wire.Done]:
        yield self.done

    async def close(self) -> None:
        pass


class StillEngine:
    """An engine that only keeps what it is asked for."""

    failure, restarts, retry_at = None, 0, None
    info = SimpleNamespace(context=1000, model_context=1000, vocab=1000)
    defaults: dict[str, Any] = {"temperature": 0.5}  # noqa: RUF012

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.asked: list[tuple[SamplingParams, int]] = []

    def generate(self, prompt: list[int], params: SamplingParams, index: int, *_: Any) -> Run:
        self.asked.append((params, index))
        return Run()


@pytest.fixture(scope="module")
def text() -> Iterator[TextWork]:
    made = TextWork(scripted.load_text(EngineConfig()))
    yield made
    made.close()


def ask(text: TextWork, handler: Handler, request: Any) -> list[tuple[SamplingParams, int]]:
    """What reaches the engine of a request."""

    async def play() -> list[tuple[SamplingParams, int]]:
        engine: Any = StillEngine()
        service = Service(ServerConfig(), ("m",), engine, Metrics())
        service.text = text
        answer = await handler(service, request, {"state": {}})
        if isinstance(answer, Stream):
            async for _ in answer.events:
                pass
        asked: list[tuple[SamplingParams, int]] = engine.asked
        return asked

    return asyncio.run(play())


CHATS = [
    (chat_completions, ChatRequest(messages=SAID, n=3, seed=7)),
    (chat_completions, ChatRequest(messages=SAID, n=2, stream=True, temperature=0)),
    (messages, MessagesRequest(messages=[InputMessage("user", "Hello")], max_tokens=5000)),
    (responses, ResponsesRequest(input="Hello", stream=True)),
]
TEXTS = [
    (completions, CompletionRequest(prompt=["a", "b"], n=2)),
    (completions, CompletionRequest(prompt=[1, 2], stream=True, echo=True, logprobs=1)),
]


@pytest.mark.parametrize(("handler", "request_"), [*CHATS, *TEXTS])
def test_sampling_params_are_made_once(
    text: TextWork, monkeypatch: pytest.MonkeyPatch, handler: Handler, request_: Any
) -> None:
    made: list[SamplingParams] = []
    check = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: (made.append(self), check(self))[1])
    asked = ask(text, handler, request_)
    assert len(made) == 1
    assert all(params is made[0] for params, _ in asked)
    count = getattr(request_, "n", None) or 1
    assert [index for _, index in asked] == list(range(count)) * (len(asked) // count)


@pytest.mark.parametrize(("handler", "request_"), CHATS)
def test_a_conversation_is_read_once(
    text: TextWork, monkeypatch: pytest.MonkeyPatch, handler: Handler, request_: Any
) -> None:
    calls: list[str] = []
    for name in ("form_of", "write_prompt"):
        real = getattr(conversation, name)

        def counted(*arguments: Any, real: Any = real, name: str = name) -> Any:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(conversation, name, counted)
    ask(text, handler, request_)
    assert calls == ["form_of", "write_prompt"]


def test_a_grammar_is_compiled_while_the_prompt_is_written(
    text: TextWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other to begin: one after the other, neither would end."""
    written, compiled = asyncio.Event(), asyncio.Event()
    write = conversation.write_prompt

    async def write_prompt(*arguments: Any) -> Any:
        written.set()
        await compiled.wait()
        return await write(*arguments)

    async def compile_grammar(self: Service, *_: Any) -> None:
        compiled.set()
        await written.wait()

    monkeypatch.setattr(conversation, "write_prompt", write_prompt)
    monkeypatch.setattr(Service, "compile", compile_grammar)
    constrained = ChatRequest(messages=SAID, response_format=ResponseFormat("json_object"))
    assert len(ask(text, chat_completions, constrained)) == 1


def test_a_prompt_is_not_written_to_the_end_for_a_request_that_is_refused(
    text: TextWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    async def write_prompt(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(conversation, "write_prompt", write_prompt)
    with pytest.raises(ApiError, match="top_logprobs needs logprobs"):
        ask(text, chat_completions, ChatRequest(messages=SAID, top_logprobs=3))
    assert ended == [True]


def test_an_answer_that_may_be_shorter_is(text: TextWork) -> None:
    ((params, _),) = ask(text, *CHATS[2])
    assert params.max_tokens is not None and 900 < params.max_tokens < 1000


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, max_tokens=None, seed=2**64 - 1, stop="end", logprobs=0),
        SamplingParams(
            temperature=1.25, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=-1, frequency_penalty=2,
            repetition_penalty=1.1, stop=["a", "ü"], stop_token_ids=[3, 5], ignore_eos=True, min_tokens=2,
            logit_bias={7: -3.5, 9: 100}, skip_special_tokens=False, include_stop_str_in_output=True, prompt_logprobs=3,
        ),
    ],
)  # fmt: skip
def test_they_come_out_of_the_engines_socket_as_they_went_in(params: SamplingParams) -> None:
    sent = wire.Generate(1, b"\1\0\0\0", params, index=2)
    assert wire.to_engine.decode(frame(sent)[HEADER.size :]) == sent


def test_tokenize_counts_what_a_chat_reads(scripted: RunningServer) -> None:
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    chat = {"messages": SAID, "tools": [{"type": "function", "function": function}]}
    counted = scripted.post("/tokenize", chat).json()["count"]
    usage = scripted.post("/v1/chat/completions", {**chat, "max_tokens": 1}).json()["usage"]
    assert counted == usage["prompt_tokens"]
    assert counted > scripted.post("/tokenize", {"messages": SAID}).json()["count"]
