"""What one streamed answer looked like to the client that received it, and many of them together."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from monotape.cli.endpoint import ChatStream, Chunk, Endpoint
from monotape.cli.remote import cached_tokens, decode_speed
from monotape.errors import RequestError

_WORDS = [
    "tape",
    "reel",
    "head",
    "spool",
    "motor",
    "groove",
    "level",
    "signal",
    "track",
    "noise",
    "needle",
    "lever",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """How every request looks."""

    max_tokens: int
    prompt_words: int
    fresh: bool  # each prompt begins differently


@dataclass(frozen=True, slots=True)
class Measurement:
    """One answer. Times are the client's own; what the server did not say is None."""

    prompt_tokens: int | None
    cached_tokens: int | None
    tokens: int
    counted_by: str  # "usage": the server counted the tokens; "chunks": each chunk was taken for one
    ttft_s: float  # from sending the request to the first text
    total_s: float
    client_tokens_per_second: float | None  # from the first text to the last
    engine_tokens_per_second: float | None  # by the engine's own clock
    share: float | None  # of the engine's speed that reached the client
    gaps_s: tuple[float, ...]  # between one arrival of text and the next
    token_gaps_s: tuple[float, ...]  # the same for each token: several that arrive together share their gap


def prompt(settings: Settings, number: int) -> str:
    """Words that mean nothing; the first one differs from request to request unless a cache is to be measured."""
    first = f"Request {number if settings.fresh else 0} of {time.time_ns() if settings.fresh else 0}."
    words = [_WORDS[(7 * place) % len(_WORDS)] for place in range(settings.prompt_words)]
    return f"{first} Write a long story with these words: {' '.join(words)}"


def measure(endpoint: Endpoint, model: str, settings: Settings, number: int) -> Measurement:
    """Asks once and takes the time."""
    stream = endpoint.stream_chat(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt(settings, number)}],
            "max_tokens": settings.max_tokens,
            "temperature": 0,
            "ignore_eos": True,  # answers of one length; servers that do not know the field may stop earlier
        }
    )
    for _ in stream:
        pass
    return measurement(stream, time.perf_counter())


def measurement(stream: ChatStream, ended_s: float) -> Measurement:
    arrivals = [chunk for chunk in stream.chunks if chunk.text or chunk.reasoning]
    if not arrivals:
        raise RequestError(
            "The server answered without any text.", "Try another model or a longer --max-tokens."
        )
    counted = stream.usage.get("completion_tokens")
    tokens = counted if isinstance(counted, int) and counted > 0 else len(arrivals)
    first, last = arrivals[0].time_s, arrivals[-1].time_s
    # The first arrival starts the clock, so its own tokens do not count.
    decoded = tokens - (arrivals[0].tokens or 1)
    client = decoded / (last - first) if decoded > 0 and last > first else None
    engine = decode_speed(stream.timings)
    pairs = list(itertools.pairwise(arrivals))
    return Measurement(
        prompt_tokens=stream.usage.get("prompt_tokens"),
        cached_tokens=cached_tokens(stream.usage),
        tokens=tokens,
        counted_by="usage" if tokens == counted else "chunks",
        ttft_s=first - stream.started_s,
        total_s=ended_s - stream.started_s,
        client_tokens_per_second=client,
        engine_tokens_per_second=engine,
        share=client / engine if client and engine else None,
        gaps_s=tuple(after.time_s - before.time_s for before, after in pairs),
        token_gaps_s=tuple(_token_gaps(pairs, decoded)),
    )


def _token_gaps(pairs: Sequence[tuple[Chunk, Chunk]], decoded: int) -> Iterator[float]:
    """A gap for each token. Where the server does not say how many came together, they are dealt out evenly."""
    even = decoded / len(pairs) if pairs else 1.0
    for before, after in pairs:
        together = max(1.0, float(after.tokens or even))
        yield from [(after.time_s - before.time_s) / together] * round(together)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by this share of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(url: str, model: str, settings: Settings, runs: Sequence[Measurement]) -> dict[str, Any]:
    """Every request, and medians with their spread over all of them."""
    found: dict[str, Any] = {
        "url": url,
        "model": model,
        **dataclasses.asdict(settings),
        "requests": len(runs),
    }
    for name in ("ttft_s", "client_tokens_per_second", "engine_tokens_per_second", "share"):
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        found[name] = _spread(values)
    for name in ("gaps_s", "token_gaps_s"):
        values = [gap for run in runs for gap in getattr(run, name)]
        found[name] = (
            {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}
            if values
            else None
        )
    hidden = {"gaps_s", "token_gaps_s"}
    found["runs"] = [
        {key: value for key, value in dataclasses.asdict(run).items() if key not in hidden} for run in runs
    ]
    return found


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def table(found: dict[str, Any]) -> str:
    """The summary for a person."""
    runs = found["runs"]
    lengths = sorted({run["tokens"] for run in runs})
    prompts = sorted({run["prompt_tokens"] for run in runs if run["prompt_tokens"] is not None})
    answers = _range(lengths) + (
        " tokens" if runs[0]["counted_by"] == "usage" else " chunks (tokens not counted)"
    )
    rows = [
        ("server", f"{found['url']}, {found['model']}"),
        ("requests", f"{found['requests']}, one at a time, greedy, streamed"),
        ("prompt", f"{_range(prompts)} tokens" if prompts else "the server does not say how long"),
        ("answer", answers),
        ("first token", _milliseconds(found["ttft_s"])),
        ("at the client", _speed(found["client_tokens_per_second"])),
        ("in the engine", _speed(found["engine_tokens_per_second"])),
        ("share", _share(found["share"])),
        ("between tokens", _gaps(found["token_gaps_s"])),
        ("between chunks", _gaps(found["gaps_s"])),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _range(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _milliseconds(spread: dict[str, float]) -> str:
    low, middle, high = (1000 * spread[key] for key in ("min", "median", "max"))
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def _speed(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "not said by the server"
    return f"{spread['median']:.1f} tok/s ({spread['min']:.1f} to {spread['max']:.1f})"


def _share(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "unknown without the engine's own speed"
    share = f"{100 * spread['median']:.1f} %"
    if (
        spread["median"] > 1
    ):  # the first text came later than the rest: a client cannot be faster than the engine
        return f"all of the engine's speed reaches the client ({share} by two clocks)"
    return f"{share} of the engine's speed reaches the client"


def _gaps(found: dict[str, float] | None) -> str:
    if found is None:
        return "one arrival only"
    p50, p99, most = (1000 * found[key] for key in ("p50", "p99", "max"))
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {most:.2f} ms"
