"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface, which Claude Code speaks."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Scope

from monotape.server.api_error import ApiError
from monotape.server.apis.progress import Reading
from monotape.server.conversation.blocks import Block, Blocks, Step
from monotape.server.conversation.conversation import Conversation, converse, prompt_of
from monotape.server.engine import wire
from monotape.server.http.endpoint import Stream
from monotape.server.http.replies import sse
from monotape.server.requests.anthropic import CountTokensRequest, MessagesRequest, to_chat
from monotape.server.service.clock import Clock
from monotape.server.service.service import Service

_DELTAS = {"content": "text", "reasoning": "thinking", "call": "partial_json"}
_DELTA_TYPES = {"content": "text_delta", "reasoning": "thinking_delta", "call": "input_json_delta"}


async def count_tokens(service: Service, request: CountTokensRequest, scope: Scope) -> dict[str, Any]:
    """How many tokens a message would have as its prompt."""
    service.check_model(request.model)
    prompt = await prompt_of(service, to_chat(request))
    return {"input_tokens": len(prompt.ids)}


async def messages(service: Service, request: MessagesRequest, scope: Scope) -> dict[str, Any] | Stream:
    """Answers a conversation in Anthropic's terms, whole or streamed."""
    clock, model = service.receive(scope["state"], request.model)
    conversation = await converse(service, to_chat(request), clock, clamp=True)
    most = conversation.work.params.max_tokens
    clamped = most is not None and most < request.max_tokens
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
    if request.stream:
        return Stream(_stream(conversation, head, clamped), failure)
    blocks = Blocks()
    async with conversation.answers() as parts:
        async for part in parts:
            blocks.feed(part.events)
            if part.done is not None:
                done = part.done
    return {
        **head,
        "content": [_block(block) for block in blocks.all],
        **_stop(done, blocks, clamped),
        "usage": _usage(done.stats),
        "metrics": clock.metrics(),
        "timings": clock.timings(),
    }


def failure(error: ApiError) -> bytes:
    return sse(error.anthropic(), "error")


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        try:
            arguments = json.loads(block.text or "{}")
        except (ValueError, RecursionError):  # cut off by max_tokens, or too deep
            arguments = {}
        return {"type": "tool_use", "id": _call_id(block), "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _call_id(block: Block) -> str:
    return f"toolu_{block.id.removeprefix('call_')}"


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": _call_id(block), "name": block.name, "input": {}}
    return _block(Block(block.index, block.kind))


def _stop(done: wire.Done, blocks: Blocks, clamped: bool) -> dict[str, Any]:
    """`clamped`: the context had less room than was asked for, so it is the context that ends a long answer."""
    called = any(block.kind == "call" for block in blocks.all)
    if done.finish_reason == "length":
        reason = "model_context_window_exceeded" if clamped else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(done.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(stats: wire.Stats) -> dict[str, Any]:
    """Here cached tokens are not part of the input's."""
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.new_tokens,
    }


async def _stream(
    conversation: Conversation, head: dict[str, Any], clamped: bool
) -> AsyncGenerator[bytes, None]:
    work, blocks, reading = conversation.work, Blocks(), Reading(conversation.work)
    usage = {
        "input_tokens": len(work.prompt), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }  # fmt: skip
    start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield sse({"type": "message_start", "message": start}, "message_start") + sse({"type": "ping"}, "ping")
    async with conversation.answers() as parts:
        async for part in parts:
            steps = blocks.feed(part.events)
            if part.done is not None:
                steps += blocks.end()
                yield b"".join([*map(_event, steps), _last(part.done, blocks, work.clock, clamped)])
            elif events := b"".join(map(_event, steps)) + reading.comment(part.piece):
                yield events


def _last(done: wire.Done, blocks: Blocks, clock: Clock, clamped: bool) -> bytes:
    delta = {
        "type": "message_delta", "delta": _stop(done, blocks, clamped), "usage": _usage(done.stats),
        "metrics": clock.metrics(), "timings": clock.timings(),
    }  # fmt: skip
    return sse(delta, "message_delta") + sse({"type": "message_stop"}, "message_stop")


def _event(step: Step) -> bytes:
    block = step.block
    if step.what == "open":
        data = {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
    elif step.what == "delta":
        delta = {"type": _DELTA_TYPES[block.kind], _DELTAS[block.kind]: step.text}
        data = {"type": "content_block_delta", "index": block.index, "delta": delta}
    else:
        data = {"type": "content_block_stop", "index": block.index}
    return sse(data, str(data["type"]))
