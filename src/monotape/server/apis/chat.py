"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Scope

from monotape.engine.answer import Answer, CallArguments, CallBegins, Event
from monotape.server.apis.openai_frame import DONE, begin, failure, whole
from monotape.server.apis.progress import Reading
from monotape.server.apis.usage import finish_reason, openai_usage, token_logprobs
from monotape.server.conversation.conversation import Conversation, Part, converse
from monotape.server.engine import wire
from monotape.server.http.endpoint import Stream
from monotape.server.http.replies import sse
from monotape.server.requests.openai import ChatRequest
from monotape.server.service.clock import so_far
from monotape.server.service.service import Service


async def chat_completions(service: Service, request: ChatRequest, scope: Scope) -> dict[str, Any] | Stream:
    """Answers a conversation, whole or streamed; tools, structured output, log-probabilities, reasoning."""
    clock, head = begin(service, scope, request.model, "chatcmpl", "chat.completion")
    conversation = await converse(service, request, clock)
    if request.stream:
        return Stream(_ChatStream(request, conversation, head).events(), failure)
    choices: list[dict[str, Any]] = []
    chosen: list[wire.Chosen] = []  # tokens of the completion that runs
    async with conversation.answers() as parts:
        async for part in parts:
            if part.piece is not None:
                chosen += part.piece.chosen or []
            if part.done is not None:
                choices.append(_choice(service, request, part, part.done, chosen))
                chosen = []
    return whole(head, choices, openai_usage(clock.done), clock)


def _choice(
    service: Service, request: ChatRequest, last: Part, done: wire.Done, chosen: list[wire.Chosen]
) -> dict[str, Any]:
    return {
        "index": last.index,
        "message": _message(last.answer, request),
        "logprobs": {"content": token_logprobs(service, chosen)} if request.logprobs else None,
        "finish_reason": finish_reason(done, last.answer),
        "stop_reason": done.stop_reason,
    }


def _message(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": (answer.content if answer.content.strip() else None) if calls else answer.content,
        "refusal": None,
    }
    if answer.reasoning and request.include_reasoning is not False:
        message["reasoning"] = message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


class _ChatStream:
    """A streamed answer: every message of the engine becomes at most a few chunks."""

    def __init__(self, request: ChatRequest, conversation: Conversation, head: dict[str, Any]) -> None:
        self._request, self._conversation = request, conversation
        self._head = {**head, "object": "chat.completion.chunk"}
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._tokens = 0  # of the completion that runs
        self._reading = self._new_reading()

    async def events(self) -> AsyncGenerator[bytes, None]:
        conversation, clock = self._conversation, self._conversation.work.clock
        for index in range(conversation.completions):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async with conversation.answers() as parts:
            async for part in parts:
                if chunks := self._chunks(part):
                    yield chunks
        if self._usage:
            figures = {
                "usage": openai_usage(clock.done),
                "metrics": clock.metrics(),
                "timings": clock.timings(),
            }
            yield sse({**self._head, "choices": [], **figures})
        yield DONE

    def _chunks(self, part: Part) -> bytes:
        piece = part.piece
        if piece is None:
            assert part.done is not None
            last = self._deltas(part.index, part.events, None) + self._last(
                part.index, part.done, part.answer
            )
            self._tokens, self._reading = 0, self._new_reading()
            return last
        told = self._reading.told(piece)
        if piece.read is not None:
            return told
        self._tokens += len(piece.token_ids)
        return told + self._deltas(part.index, part.events, piece)

    def _new_reading(self) -> Reading:
        return Reading(self._conversation.work, self._head if self._request.return_progress else None)

    def _deltas(self, index: int, events: list[Event], piece: wire.Piece | None) -> bytes:
        """One chunk for what is said, one for each step of a tool call."""
        said: dict[str, str] = {}
        chunks: list[bytes] = []
        for event in events:
            if isinstance(event, CallBegins):
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": event.id, "type": "function", "function": function}
                chunks.append(self._chunk(index, {"tool_calls": [call]}))
            elif isinstance(event, CallArguments):
                call = {"index": event.index, "function": {"arguments": event.text}}
                chunks.append(self._chunk(index, {"tool_calls": [call]}))
            elif event.kind == "content":
                said["content"] = said.get("content", "") + event.text
            elif self._request.include_reasoning is not False:
                said["reasoning"] = said["reasoning_content"] = said.get("reasoning", "") + event.text
        chosen = piece.chosen if piece is not None and self._request.logprobs else None
        if said or chosen:
            extra = (
                {"logprobs": {"content": token_logprobs(self._conversation.service, chosen)}}
                if chosen
                else {}
            )
            chunks.insert(0, self._chunk(index, dict(said), piece, **extra))
        return b"".join(chunks)

    def _last(self, index: int, done: wire.Done, answer: Answer) -> bytes:
        clock = self._conversation.work.clock
        choice = {
            "index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason(done, answer),
            "stop_reason": done.stop_reason,
        }  # fmt: skip
        figures = {"metrics": clock.metrics(), "timings": clock.timings()}
        return sse({**self._head, "choices": [choice], **self._usage_so_far(), **figures})

    def _usage_so_far(self) -> dict[str, Any]:
        """Of the completion that runs, if every chunk is to have it."""
        if not self._continuous:
            return {}
        prompt, completion = len(self._conversation.work.prompt), self._tokens
        total = prompt + completion
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}

    def _chunk(
        self, index: int, delta: dict[str, Any], piece: wire.Piece | None = None, **extra: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        chunk = {**self._head, "choices": [choice], **self._usage_so_far()}
        if piece is not None and self._request.timings_per_token:
            chunk["timings"] = so_far(self._tokens, piece.decode_ns)
        return sse(chunk)
