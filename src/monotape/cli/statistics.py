"""How fast a request ran, for people and for programs: against the bandwidth that `monotape doctor` measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from monotape.errors import BackendUnavailable, MonotapeError

if TYPE_CHECKING:  # commands that generate nothing must not wait for NumPy
    from monotape.backends.protocol import Backend
    from monotape.engine.outputs import GenerationStats
    from monotape.engine.sampling_params import SamplingParams


def ceiling(stats: GenerationStats, backend: Backend) -> float | None:
    """Bytes per second that this machine's cores, or its GPU, can read; None where it could not be measured.

    A figure that a request beats was measured while the machine had other work: it is measured again, once.
    """
    if backend.name == "cuda":
        return _gpu_ceiling()
    from monotape.backends.cpu.bandwidth import known_bandwidth, measure_bandwidth, remember_bandwidth

    try:
        known = known_bandwidth()
        if (_share(stats, known.bytes_per_second) or 0) <= 1:
            return known.bytes_per_second
        return remember_bandwidth(measure_bandwidth()).bytes_per_second
    except BackendUnavailable:
        return None


def _gpu_ceiling() -> float | None:
    from monotape.backends.cuda.bandwidth import known_bandwidth

    try:
        return known_bandwidth()
    except MonotapeError:  # too little memory is left to measure with
        return None


def stats_object(stats: GenerationStats, backend: Backend) -> dict[str, Any]:
    """The figures of a request as a JSON object."""
    bandwidth = ceiling(stats, backend)
    return {
        **dataclasses.asdict(stats),
        "backend": backend.name,
        "dtype": backend.plan.formats,
        "ranks": len(backend.plan.ranks),
        "workers": backend.plan.machine.workers * len(backend.plan.ranks),
        "read_bandwidth": bandwidth,
        "bandwidth_share": _share(stats, bandwidth),
    }


def stats_line(stats: GenerationStats, backend: Backend) -> str:
    """The same in one line for a person."""
    bandwidth = ceiling(stats, backend)
    parts = [f"{stats.new_tokens} tokens"]
    if stats.decode_tokens_per_second:
        parts.append(f"{stats.decode_tokens_per_second:.1f} tok/s")
    share = _share(stats, bandwidth)
    if share is not None and bandwidth is not None:
        cache = " (some of it from the cache)" if share > 1 else ""
        parts.append(f"{100 * share:.0f} % of the {bandwidth / 1e9:.1f} GB/s this machine reads{cache}")
    if stats.ttft_s is not None:
        parts.append(f"first token after {1000 * stats.ttft_s:.0f} ms")
    if stats.drafted_tokens:
        parts.append(f"drafts: {stats.drafted_tokens}, accepted {stats.accepted_tokens}")
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    parts.append(f"prompt {stats.prompt_tokens}{cached}")
    parts.append(f"{stats.bytes_per_token / 1e6:.0f} MB per token")
    workers, ranks = backend.plan.machine.workers, len(backend.plan.ranks)
    shared = f"{workers} workers" if ranks == 1 else f"{ranks} ranks of {workers} workers"
    parts.append(f"{backend.name}, {backend.plan.formats}, {shared}")
    return " · ".join(parts)


_SHOWN = {
    "temperature": "temperature", "top_p": "top-p", "top_k": "top-k", "min_p": "min-p",
    "repetition_penalty": "repetition penalty",
}  # fmt: skip


def sampling_line(params: SamplingParams, given: Collection[str], source: str) -> str:
    """How tokens were chosen: what the user asked for, and what came from elsewhere with its source."""
    if params.temperature == 0:
        return (
            "greedy (as asked)" if "temperature" in given else f"greedy ({source.removeprefix('greedy, ')})"
        )
    untouched = type(params)(temperature=1.0)
    values = {
        name: f"{label} {getattr(params, name):g}"
        for name, label in _SHOWN.items()
        if name == "temperature" or getattr(params, name) != getattr(untouched, name)
    }
    groups = [
        (", ".join(text for name, text in values.items() if (name in given) is asked), note)
        for asked, note in ((True, "as asked"), (False, source))
    ]
    return ", ".join(f"{text} ({note})" for text, note in groups if text)


def sampling_object(params: SamplingParams, source: str) -> dict[str, Any]:
    """The same for programs."""
    return {**{name: getattr(params, name) for name in _SHOWN}, "defaults": source}


def loaded(llm: Any) -> str:
    """What a model's name stood for: `smollm2` is one file with a network and another without."""
    from monotape.weights.hub import described

    return described(llm.source or llm.config.model)


def _share(stats: GenerationStats, bandwidth: float | None) -> float | None:
    speed = stats.decode_tokens_per_second
    return speed * stats.bytes_per_token / bandwidth if speed and bandwidth else None
