"""One chat from a checked request to its answers: every interface brings it here once, and reads what comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from monotape.backends.token_ids import TokenIds
from monotape.engine.answer import Answer, Event
from monotape.engine.harmony.marks import SPECIAL
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import RequestError
from monotape.server.api_error import bad_request
from monotape.server.conversation.answer import AnswerStyle
from monotape.server.conversation.prompt import ChatPrompt, Form, form_of, write_prompt
from monotape.server.engine import wire
from monotape.server.requests.openai import ChatRequest
from monotape.server.requests.sampling import completions_of, sampling_params
from monotape.server.service.clock import Clock
from monotape.server.service.gate import Turn
from monotape.server.service.service import Service, Work


@dataclass(frozen=True, slots=True)
class Part:
    """One message of the engine and what it says; the last one of each completion is `done`."""

    index: int  # which completion of the request
    message: wire.Piece | wire.Done
    events: list[Event]
    answer: Answer  # as far as it has come

    @property
    def done(self) -> wire.Done | None:
        return self.message if isinstance(self.message, wire.Done) else None

    @property
    def piece(self) -> wire.Piece | None:
        return None if isinstance(self.message, wire.Done) else self.message


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat that is ready and has its place in the queue."""

    service: Service
    work: Work
    completions: int
    style: AnswerStyle
    turn: Turn

    def answers(self) -> contextlib.aclosing[AsyncGenerator[Part, None]]:
        """Waits for its turn and runs all completions. Leaving the block early cancels them."""
        return contextlib.aclosing(self._answers())

    async def _answers(self) -> AsyncGenerator[Part, None]:
        async with self.turn:
            self.work.clock.entered()
            for index in range(self.completions):
                answer = self.style.new_answer()
                async with self.service.complete(self.work, index) as messages:
                    async for message in messages:
                        if isinstance(message, wire.Done):
                            events = answer.end(message.text, cut=message.finish_reason == "length")
                        else:
                            events = answer.feed(message.text)
                        yield Part(index, message, events, answer)


async def converse(
    service: Service, request: ChatRequest, clock: Clock, *, clamp: bool = False
) -> Conversation:
    """Makes a chat ready and lines it up; whatever is wrong with it is an error here, before its answer begins.

    `clamp`: an answer may be shorter than asked for, so only the prompt has to fit the context.
    """
    _, info = service.loaded()
    with service.lining_up(clock) as turn:
        form = form_of(service, request)
        completions = clock.answers = completions_of(request)
        writing = asyncio.ensure_future(write_prompt(service, request, form, clock, info.context))
        # Its error is taken note of even where another one is raised.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await _compiled(service, form)
            params = None if clamp else _params(service, request, form)
            prediction = await _predicted(service, request, info.context)
            prompt = await writing
        finally:
            writing.cancel()  # where something else is wrong with the request
        if params is None:
            params = _params(service, request, form, info.context - len(prompt.ids))
        service.check(prompt.ids, params)
    grammar = None if form.asked is None else form.asked.grammar
    mark = SPECIAL if form.harmony else ""
    work = Work(prompt.ids, params, grammar, clock, mark, progress=True, prediction=prediction)
    return Conversation(service, work, completions, prompt.style, turn)


async def prompt_of(service: Service, request: ChatRequest) -> ChatPrompt:
    """The prompt of a chat that is only counted: it takes no place in the queue and need not fit the context."""
    form = form_of(service, request)
    return await write_prompt(service, request, form, Clock(), service.config.max_body_bytes)


async def _predicted(service: Service, request: ChatRequest, context: int) -> TokenIds | None:
    """The tokens that the client expects to see again, while other processes and threads write the prompt."""
    if request.prediction is None or not request.prediction.text:
        return None
    text, _ = service.loaded()
    try:
        ids, _ = await text.predicted(request.prediction.text, context=context)
    except RequestError as error:
        raise bad_request(f"{error.message} {error.hint}", "prediction", "invalid_value") from None
    return ids


async def _compiled(service: Service, form: Form) -> None:
    """Has the grammar of an answer compiled, while other processes and threads write its prompt."""
    if form.asked is not None:
        await service.compile(form.asked.grammar, form.asked.param)
    else:
        await asyncio.sleep(0)  # lets the prompt begin


def _params(service: Service, request: ChatRequest, form: Form, room: int = 0) -> SamplingParams:
    """How its tokens are chosen. `room` is what an answer that may be shorter than asked for has left."""
    most = request.max_completion_tokens or request.max_tokens
    if room > 0 and most is not None:
        most = min(most, room)
    decided: dict[str, Any] = {"max_tokens": most}
    if request.logprobs:
        decided["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs", "invalid_value")
    if form.harmony or (form.tools.style is not None and form.tools.style.special):
        decided["skip_special_tokens"] = False
    return sampling_params(request, service.engine.defaults, **decided)
