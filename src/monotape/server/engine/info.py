"""What `GET /monotape/info` says about the running model, for the playground and for scripts.

    {
      "model": "smollm2",                   the first served name
      "dtype": "q8",                        weights in memory: "bf16", "q4_k and q6_k, head q8", ...
      "kv_dtype": "f16",
      "backend": "cpu",                     cpu, cuda, reference
      "workers": 2,                         threads, or multiprocessors
      "context": 8192,                      prompt and answer together, in tokens
      "model_context": 8192,                the most that the model was made for
      "bytes_per_token": {
        "weights": 144000000,               what every decoded token reads
        "kv_per_position": 11520            and what each position before it adds
      },
      "bandwidth_bytes_per_second": 2.1e10, measured on this machine; null where it was not measured
      "speed_of_light_tokens_per_second": 145.8,   bandwidth / weights: the ceiling at an empty context; null with it
      "version": "0.1.0",
      "launches": 1,                        kernel launches a request takes; null on a CPU
      "token_timeline": null,               or [{"stage": "qkv", "start_us": 0.0, "us": 1.5}, ...]: the stages of
                                            one token, layer after layer, from the device's clock
      "completes": null,                    or "python": what a model writes that does not chat
      "startup": [{"phase": "weights", "seconds": 1.7}, ...],
      "sampling": {"temperature": 0.7, ...}  what fields that a request leaves out become
    }

The ceiling at a context of n positions is bandwidth / (weights + n * kv_per_position).

Every answer carries its own figures, all taken from the engine's clocks except the queue's. `metrics` has vLLM's
names, `timings` llama.cpp's. In a stream both are in the chunk with the finish reason and in the usage chunk; with
`"timings_per_token": true` in the request every chunk has `timings` with the figures so far:

    "metrics": {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
                "tokens_per_second", "decode_tokens_per_second"}
    "timings": {"cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
                "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
                "itl_p50_ms", "itl_p99_ms", "bytes_per_token", "draft_n", "draft_n_accepted",
                "phases": [{"phase": "render" | "tokenize" | "queue" | "prefill" | "decode", "start_ms", "ms"}]}

`prompt_n` counts the prompt tokens that were computed and `cache_n` those that were not. `draft_n` counts drafts that
were checked and `draft_n_accepted` those that are part of the answer; `usage.completion_tokens_details` has the latter
as `accepted_prediction_tokens` and the others as `rejected_prediction_tokens`, whether a draft came from the request's
`prediction`, from the prompt or from the answer itself. Chunks sent while the answer is being made have only
`predicted_n` and `predicted_ms` (from the first token on) in `timings`.

With `"return_progress": true`, as in llama.cpp, a stream says how far its prompt has been read: for every part of it,
at most twenty times a second, a chunk without choices has `prompt_progress`. `processed` counts the `cache` too. Other
streams have comment lines, which clients skip:

    "prompt_progress": {"total": 9300, "cache": 512, "processed": 4096, "time_ms": 2150}
    : 4096 of 9300 prompt tokens read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from monotape.errors import MonotapeError
from monotape.weights.embedded import is_embedded

_TRACED_CONTEXT = 32  # positions before the token whose stages are shown


class BytesPerToken(msgspec.Struct, frozen=True):
    """What a decoded token reads."""

    weights: int
    kv_per_position: int


class StageTime(msgspec.Struct, frozen=True):
    """One stage of one token, from the device's clock."""

    stage: str
    start_us: float
    us: float


class PhaseTime(msgspec.Struct, frozen=True):
    """One line of the start-up table."""

    phase: str
    seconds: float


class ModelInfo(msgspec.Struct, frozen=True):
    """What the engine process knows about the model it has loaded."""

    dtype: str
    kv_dtype: str
    backend: str
    workers: int
    context: int
    model_context: int
    vocab: int
    bytes_per_token: BytesPerToken
    bandwidth_bytes_per_second: float | None
    speed_of_light_tokens_per_second: float | None
    launches: int | None
    token_timeline: list[StageTime] | None
    completes: str | None = None


def describe(llm: Any) -> ModelInfo:
    """Reads it off a loaded model; what only a GPU's backend knows is None elsewhere."""
    backend, plan = llm.backend, llm.backend.plan
    weights = plan.token_bytes(0)
    bandwidth = _bandwidth(backend.name)
    return ModelInfo(
        dtype=plan.formats,
        kv_dtype=plan.ranks[0].kv.format.value,
        backend=backend.name,
        workers=plan.machine.workers,
        context=llm.max_model_len,
        model_context=backend.spec.context,
        vocab=backend.spec.vocab,
        bytes_per_token=BytesPerToken(weights, plan.token_bytes(1) - weights),
        bandwidth_bytes_per_second=bandwidth,
        speed_of_light_tokens_per_second=bandwidth / weights if bandwidth else None,
        launches=1 if backend.name == "cuda" else None,
        token_timeline=_timeline(backend) if backend.name == "cuda" else None,
        completes="python" if is_embedded(llm.source) else None,
    )


def _bandwidth(backend: str) -> float | None:
    """Bytes per second, measured once a machine and then remembered; None where it could not be measured."""
    try:
        if backend == "cuda":
            from monotape.backends.cuda import bandwidth as gpu

            return float(gpu.known_bandwidth())
        if backend == "cpu":
            from monotape.backends.cpu import bandwidth as cpu

            return cpu.known_bandwidth().bytes_per_second
    except MonotapeError:  # too little memory is left to measure with
        pass
    return None


def _timeline(backend: Any) -> list[StageTime] | None:
    """The stages of one token, layer after layer: from the first worker's start to the last one's end."""
    from monotape.backends.cuda.trace import Traced

    if not isinstance(backend, Traced):
        return None
    try:
        trace = backend.trace([1] * _TRACED_CONTEXT, 2)
    except MonotapeError:
        return None
    return stages_of(trace.records[trace.records["token"] == trace.records["token"].max()], trace.stages)


def stages_of(records: Any, names: Sequence[str]) -> list[StageTime]:
    """One entry for every layer and stage, in the order in which they began."""
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for layer, stage, start, end in records[["layer", "stage", "start_ns", "end_ns"]].tolist():
        first, last = spans.get((layer, stage), (start, end))
        spans[layer, stage] = min(first, start), max(last, end)
    origin = min((start for start, _ in spans.values()), default=0)
    ordered = sorted(spans.items(), key=lambda item: item[1])
    return [
        StageTime(names[stage], (start - origin) / 1e3, (end - start) / 1e3)
        for (_, stage), (start, end) in ordered
    ]


def info_object(
    model: str, info: ModelInfo, version: str, startup: list[PhaseTime], sampling: dict[str, Any]
) -> dict[str, Any]:
    """The body of the answer."""
    shown: dict[str, Any] = {"model": model, **msgspec.to_builtins(info)}
    shown["version"] = version
    shown["startup"] = msgspec.to_builtins(startup)
    shown["sampling"] = sampling
    return shown
