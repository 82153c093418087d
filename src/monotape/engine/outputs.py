"""The output of a request, in vLLM's shape, with the statistics of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from monotape.backends.protocol import Token
from monotape.backends.token_ids import TokenIds
from monotape.engine.answer import Call
from monotape.plan.types import Plan

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the model itself, before penalties, bias and temperature."""

    logprob: float
    rank: int | None = None  # 1 for the most likely; None when it is not among those asked for
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # the chosen token first, then the most likely ones


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What a request cost. Times are the backend's own; a figure that one token cannot give is None.

    A job may make more tokens than the completion holds, since a stop string may end within the tokens of one pass and
    a cancellation comes late. Tokens, times and accepted drafts are the completion's. Speed and bytes are the job's,
    over all of its tokens and passes, so that their product is what the machine read.
    """

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the KV of an earlier request
    new_tokens: int
    ttft_s: float | None  # from the start of the job to its first token
    decode_s: float  # from each first token to the last
    decode_tokens_per_second: float | None  # of the job
    bytes_per_token: (
        int  # what a decoded token of the job reads, at its mean context; an accepted draft, nothing
    )
    drafted_tokens: int = 0  # accepted and rejected drafts; both counts are known when the request has ended
    accepted_tokens: int = 0  # drafts that are surely tokens of the completion: each saved a pass
    decoded_tokens: int = 0  # of the job, its first aside


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion. The text ends before the stop string or the end-of-text token; the ids include it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None  # None: not finished
    stop_reason: int | str | None  # the stop id or stop string; None for the model's own end-of-text
    seed: int
    stats: GenerationStats
    # Only of a chat with a model that has channels (gpt-oss); others write thoughts and calls into the text.
    reasoning: str = ""
    tool_calls: list[Call] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A request with all its completions."""

    request_id: str
    prompt: str | None  # None when the request gave ids
    prompt_ids: TokenIds
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """As a list, made when it is first asked for: one of 131,072 tokens takes milliseconds."""
        return list(self.prompt_ids)

    @property
    def stats(self) -> GenerationStats:
        return combined([completion.stats for completion in self.outputs])

    @property
    def num_cached_tokens(self) -> int:
        return self.outputs[0].stats.cached_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream adds. The last has no tokens but a finish reason, and the text still held back."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""  # see CompletionOutput


def token_logprobs(token: Token, text_of: Callable[[int], str] | None) -> TokenLogprobs:
    """A token's log-probabilities as the output shows them."""
    assert token.logprob is not None
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top_logprobs, start=1)}
    shown = {token.id: Logprob(token.logprob, ranks.get(token.id), text_of and text_of(token.id))}
    for token_id, logprob in token.top_logprobs:
        shown.setdefault(token_id, Logprob(logprob, ranks[token_id], text_of and text_of(token_id)))
    return shown


def measured(
    plan: Plan, *, prompt_tokens: int, cached_tokens: int, start_ns: int, times_ns: Sequence[int],
    unsaid_ns: Sequence[int] = (), drafts: tuple[int, int] = (0, 0),
) -> GenerationStats:  # fmt: skip
    """The figures of one completion, from the backend's clock.

    `unsaid_ns`: the times of tokens that came after the completion had ended. `drafts`: how many the job checked, and
    how many it accepted.
    """
    drafted, accepted = drafts
    decoded = max(0, len(times_ns) + len(unsaid_ns) - 1)
    job_s = _seconds(times_ns or unsaid_ns, unsaid_ns or times_ns)
    pass_bytes = plan.token_bytes(prompt_tokens + decoded // 2)
    passes = max(0, decoded - accepted)
    # Backends count, and do not say which: any token after the completion may have been a draft.
    said = max(0, min(accepted - len(unsaid_ns), len(times_ns) - 1))
    return GenerationStats(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        new_tokens=len(times_ns),
        ttft_s=(times_ns[0] - start_ns) / 1e9 if times_ns else None,
        decode_s=_seconds(times_ns, times_ns),
        decode_tokens_per_second=decoded / job_s if decoded > 0 and job_s > 0 else None,
        bytes_per_token=pass_bytes * passes // decoded if accepted and decoded else pass_bytes,
        drafted_tokens=drafted - accepted + said,
        accepted_tokens=said,
        decoded_tokens=decoded,
    )


def _seconds(first_ns: Sequence[int], last_ns: Sequence[int]) -> float:
    return (last_ns[-1] - first_ns[0]) / 1e9 if first_ns and last_ns else 0.0


def combined(parts: Sequence[GenerationStats]) -> GenerationStats:
    """The figures of several completions of one prompt: tokens and times add up, the first TTFT stands."""
    if len(parts) == 1:
        return parts[0]
    timed = [(part, speed) for part in parts if (speed := part.decode_tokens_per_second) is not None]
    decoded = sum(part.decoded_tokens for part, _ in timed)
    job_s = sum(part.decoded_tokens / speed for part, speed in timed)
    read = sum(part.bytes_per_token * part.decoded_tokens for part, _ in timed)
    return GenerationStats(
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        new_tokens=sum(part.new_tokens for part in parts),
        ttft_s=parts[0].ttft_s,
        decode_s=sum(part.decode_s for part in parts),
        decode_tokens_per_second=decoded / job_s if job_s else None,
        bytes_per_token=read // decoded if decoded else parts[0].bytes_per_token,
        drafted_tokens=sum(part.drafted_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
        decoded_tokens=sum(part.decoded_tokens for part in parts),
    )
