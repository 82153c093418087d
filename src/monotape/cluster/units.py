"""Cuts the body of a request into the units by which the router recognises a conversation.

Two requests share the KV of their common prefix. The front has no tokenizer, because replicas may serve another model
while they are being updated. So it compares what the tokens are made of: tools, instructions and messages, in the order
in which templates write them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from monotape.cluster.forwarded import Unit
from monotape.server.requests.anthropic import is_billing

_TEXT, _IDS = 64, 16  # characters, or token ids, of a prompt that are one unit
#: Routes whose prompts are kept in the KV cache, and the field that grows from turn to turn.
_GROWING = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
_FIXED = ("tools", "system", "instructions")  # they come before the messages, in any template
_INSTRUCTING = ("system", "developer")  # roles


def units_of(path: str, body: bytes) -> tuple[Unit, ...]:
    """The units of a request; none for a route that has no prompt, or a body that its replica will refuse."""
    growing = _GROWING.get(path)
    if growing is None:
        return ()
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ()
    return tuple(_chained(request, growing)) if isinstance(request, dict) else ()


def _chained(request: dict[str, Any], growing: str) -> Iterator[Unit]:
    """Each unit's key covers all units before it, so that equal keys mean equal prefixes."""
    chain, end = hashlib.blake2b(growing.encode(), digest_size=8), 0
    for part in _parts(request, growing):
        data = msgspec.json.encode(part, order="deterministic")
        chain.update(len(data).to_bytes(8, "big") + data)
        end += len(data)
        yield Unit(int.from_bytes(chain.digest(), "big"), end, _is_common(part))


def _parts(request: dict[str, Any], growing: str) -> Iterator[Any]:
    for name in _FIXED:
        if request.get(name):
            yield {name: _lasting(request[name])}
    grown = request.get(growing)
    if isinstance(grown, str):
        if growing == "input":  # one user's message in a shorter spelling
            yield {"role": "user", "content": grown}
            return
        yield from _blocks(grown, _TEXT)
    elif isinstance(grown, list):
        if grown and isinstance(grown[0], int):
            yield from _blocks(grown, _IDS)
            return
        yield from (_lasting(message) for message in grown)


def _is_common(part: Any) -> bool:
    return isinstance(part, dict) and (
        part.get("role") in _INSTRUCTING or any(name in part for name in _FIXED)
    )


def _blocks(prompt: str | list[Any], size: int) -> Iterator[Any]:
    """Whole blocks only: the last part of a prompt goes on in the next turn."""
    for start in range(0, len(prompt) - size + 1, size):
        yield prompt[start : start + size]


def _lasting(value: Any) -> Any:
    """Without the marks that clients move from turn to turn and that no template sees."""
    if isinstance(value, dict):
        return {name: _lasting(inner) for name, inner in value.items() if name != "cache_control"}
    if isinstance(value, list):
        return [_lasting(inner) for inner in value if not is_billing(inner)]
    return value
