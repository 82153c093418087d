"""POST /v1/responses, without state: OpenAI's newer interface, the only one that Codex speaks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.types import Scope

from monotape.server.api_error import ApiError
from monotape.server.apis.progress import Reading
from monotape.server.conversation.blocks import Block, Blocks, Step
from monotape.server.conversation.conversation import Conversation, Part, converse
from monotape.server.engine import wire
from monotape.server.http.endpoint import Stream
from monotape.server.http.replies import sse
from monotape.server.requests.responses import ResponsesRequest, to_chat
from monotape.server.requests.responses_tools import custom_names, is_whole, namespaces, text_in
from monotape.server.service.clock import Clock
from monotape.server.service.service import Service

_PREFIX = {"content": "msg", "reasoning": "rs", "call": "fc"}


async def responses(service: Service, request: ResponsesRequest, scope: Scope) -> dict[str, Any] | Stream:
    """Answers a list of items, whole or streamed; nothing is kept between requests."""
    clock, model = service.receive(scope["state"], request.model)
    conversation = await converse(service, to_chat(request), clock)
    response = _Response(request, conversation, model)
    if request.stream:
        return Stream(response.events(), response.failure)
    async with conversation.answers() as parts:
        async for part in parts:
            response.take(part)
    await response.count_thoughts()
    return response.object()


class _Response:
    """One response in the making."""

    def __init__(self, request: ResponsesRequest, conversation: Conversation, model: str) -> None:
        self._conversation, self._blocks = conversation, Blocks()
        self._done: wire.Done | None = None
        self._sequence = 0
        self._ids: dict[int, str] = {}
        self._reasoning, self._thought = "", 0  # the text, and its tokens
        self._namespaces, self._custom = namespaces(request.tools), custom_names(request.tools)
        given = msgspec.to_builtins(request)
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}", "object": "response", "created_at": int(time.time()),
            "model": model, "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
            "parallel_tool_calls": request.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": given.get("reasoning") or {"effort": None, "summary": None}, "store": False,
            "temperature": request.temperature, "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto", "tools": given.get("tools") or [],
            "top_p": request.top_p, "truncation": "disabled", "background": False,
            "metadata": request.metadata or {}, "user": None,
        }  # fmt: skip

    def take(self, part: Part) -> list[Step]:
        steps = self._blocks.feed(part.events)
        if part.done is None:
            return steps
        self._done, self._reasoning = part.done, part.answer.reasoning
        return [*steps, *self._blocks.end()]

    async def count_thoughts(self) -> None:
        """Tokens come in handfuls that need not end with the thoughts, so these are counted again."""
        text, thought = self._conversation.service.text, self._reasoning
        if thought and text is not None:
            ids, _ = await text.encode(thought, add_special=False, context=len(thought))
            self._thought = len(ids)

    def object(self, status: str | None = None, error: ApiError | None = None) -> dict[str, Any]:
        """The response as it is now."""
        clock: Clock = self._conversation.work.clock
        shown = {
            **self._head,
            "status": status or ("incomplete" if self._cut else "completed"),
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": [self._item(block, self._ended(block)) for block in self._blocks.all],
            "usage": None if self._done is None else self._usage(self._done.stats),
        }
        if self._done is not None:
            shown |= {"metrics": clock.metrics(), "timings": clock.timings()}
        return shown

    @property
    def _cut(self) -> bool:
        return self._done is not None and self._done.finish_reason == "length"

    def _ended(self, block: Block) -> str:
        """The status of an item that nothing is added to: a call must not be made that was cut off in its arguments."""
        if not self._cut:
            return "completed"
        whole = is_whole(block.text) if block.kind == "call" else block is not self._blocks.all[-1]
        return "completed" if whole else "incomplete"

    def _usage(self, stats: wire.Stats) -> dict[str, Any]:
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens},
            "output_tokens": stats.new_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": stats.prompt_tokens + stats.new_tokens,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item_id = self._ids.setdefault(block.index, f"{_PREFIX[block.kind]}_{secrets.token_hex(12)}")
        head: dict[str, Any] = {"id": item_id, "status": status}
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name}
            if block.name in self._custom:
                call |= {"type": "custom_tool_call", "input": text_in(block.text)}
            else:
                call |= {"type": "function_call", "arguments": block.text}
            if block.name in self._namespaces:
                call["namespace"] = self._namespaces[block.name]
            return {**head, **call}
        parts = [self._part(block)] if block.text else []
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
        return {**head, "type": "message", "role": "assistant", "content": parts}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    async def events(self) -> AsyncGenerator[bytes, None]:
        started = {"response": self.object("in_progress")}
        yield self._event("response.created", **started) + self._event("response.in_progress", **started)
        reading = Reading(self._conversation.work)
        async with self._conversation.answers() as parts:
            async for part in parts:
                events = b"".join([self._step(step) for step in self.take(part)])
                if events := events + reading.comment(part.piece):
                    yield events
        await self.count_thoughts()
        final = self.object()
        yield self._event(f"response.{final['status']}", response=final)

    def failure(self, error: ApiError) -> bytes:
        return self._event("response.failed", response=self.object("failed", error))

    def _step(self, step: Step) -> bytes:
        block = step.block
        if step.what == "open":
            return self._opened(Block(block.index, block.kind, "", block.id, block.name))
        place = {"item_id": self._ids[block.index], "output_index": block.index}
        if block.kind == "call" and block.name in self._custom:
            return self._custom_step(step, place)
        if block.kind != "call":
            place["content_index"] = 0
        name = {
            "content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"
        }[block.kind]  # fmt: skip
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        if step.what == "delta":
            return self._event(f"response.{name}.delta", **place, delta=step.text, **extra)
        whole = (
            {"arguments": block.text, "name": block.name}
            if block.kind == "call"
            else {"text": block.text, **extra}
        )
        events = self._event(f"response.{name}.done", **place, **whole)
        if block.kind == "content":
            events += self._event("response.content_part.done", **place, part=self._part(block))
        item = self._item(block, self._ended(block))
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _custom_step(self, step: Step, place: dict[str, Any]) -> bytes:
        """The text of a custom call lies inside its arguments, so it is known when they are whole."""
        if step.what == "delta":
            return b""
        item = self._item(step.block, self._ended(step.block))
        kind = "response.custom_tool_call_input"
        return (
            self._event(f"{kind}.delta", **place, delta=item["input"])
            + self._event(f"{kind}.done", **place, input=item["input"])
            + self._event("response.output_item.done", output_index=step.block.index, item=item)
        )

    def _opened(self, empty: Block) -> bytes:
        item = self._item(empty, "in_progress")
        events = self._event("response.output_item.added", output_index=empty.index, item=item)
        if empty.kind == "content":
            place = {"item_id": item["id"], "output_index": empty.index, "content_index": 0}
            events += self._event("response.content_part.added", **place, part=self._part(empty))
        return events

    def _event(self, kind: str, /, **data: Any) -> bytes:
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **data}, kind)
