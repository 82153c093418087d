"""Counts, reasons and log-probabilities in the shapes that clients expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monotape.engine.answer import Answer
from monotape.server.engine import wire
from monotape.server.service.service import Service


def openai_usage(done: Sequence[wire.Stats]) -> dict[str, Any]:
    """Usage of a chat or a completion; several answers to one prompt count the prompt once."""
    prompt = done[0].prompt_tokens if done else 0
    made = sum(stats.new_tokens for stats in done)
    cached = done[0].cached_tokens if done else 0
    accepted = sum(stats.accepted_tokens for stats in done)
    rejected = sum(stats.drafted_tokens for stats in done) - accepted
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        # Of drafts from a client's prediction, from the prompt and from the answer itself, which are checked alike,
        # and of tokens that a grammar forced.
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def finish_reason(done: wire.Done, answer: Answer | None = None) -> str:
    if answer is not None and answer.calls and done.finish_reason == "stop":
        return "tool_calls"
    return "length" if done.finish_reason == "length" else "stop"


def token_logprobs(service: Service, chosen: Sequence[wire.Chosen]) -> list[dict[str, Any]]:
    """Chat's log-probabilities: one object a token."""
    return [
        {
            **_token(service, token.id, token.logprob),
            "top_logprobs": [_token(service, other, logprob) for other, logprob in token.top],
        }
        for token in chosen
    ]


def _token(service: Service, token_id: int, logprob: float) -> dict[str, Any]:
    data = token_bytes(service, token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def token_bytes(service: Service, token_id: int) -> bytes:
    tokenizer = service.text.tokenizer if service.text is not None else None
    return f"token_id:{token_id}".encode() if tokenizer is None else tokenizer.pieces.bytes_of(token_id)


def token_text(service: Service, token_id: int) -> str:
    return token_bytes(service, token_id).decode("utf-8", "replace")
