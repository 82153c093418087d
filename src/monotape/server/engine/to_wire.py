"""The engine's outputs as messages to the server."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from monotape.engine.outputs import Delta, RequestOutput, TokenLogprobs
from monotape.engine.stream import TextStream
from monotape.server.engine import wire


def chosen_of(delta: Delta) -> list[wire.Chosen]:
    assert delta.logprobs is not None
    pairs = zip(delta.token_ids, delta.logprobs, strict=True)
    return [_chosen(token_id, shown) for token_id, shown in pairs]


def prompt_scores(output: RequestOutput) -> list[wire.Chosen | None] | None:
    if output.prompt_logprobs is None:
        return None
    pairs = zip(output.prompt_ids, output.prompt_logprobs, strict=True)
    return [None if shown is None else _chosen(token_id, shown) for token_id, shown in pairs]


def _chosen(token_id: int, shown: TokenLogprobs) -> wire.Chosen:
    likely = [(other, found.logprob) for other, found in shown.items() if found.rank is not None]
    top = sorted(likely, key=lambda pair: -pair[1])
    return wire.Chosen(token_id, shown[token_id].logprob, top)


def stats_of(stream: TextStream) -> wire.Stats:
    stats, times = stream.completion.stats, stream.times_ns
    return wire.Stats(
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        new_tokens=stats.new_tokens,
        prefill_ns=None if stats.ttft_s is None else round(stats.ttft_s * 1e9),
        decode_ns=round(stats.decode_s * 1e9),
        gaps_ns=gaps(times),
        bytes_per_token=stats.bytes_per_token,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
    )


def gaps(times_ns: Sequence[int]) -> tuple[int, int] | None:
    """Median and 99th percentile of the time between two tokens."""
    between = sorted(later - earlier for earlier, later in itertools.pairwise(times_ns))
    if not between:
        return None
    return round(statistics.median(between)), between[min(len(between) - 1, len(between) * 99 // 100)]
