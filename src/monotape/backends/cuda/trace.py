"""Where a token's time goes: what each worker did when, as a table and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from monotape.plan.types import Plan

#: One worker in one stage. `layer` is the number of layers for what follows the last one.
RECORD = np.dtype(
    [
        ("worker", "i4"), ("token", "i4"), ("layer", "i4"), ("stage", "i4"),
        ("start_ns", "i8"), ("waited_ns", "i8"), ("end_ns", "i8"),
        ("multiplied_ns", "i8"), ("starved_ns", "i8"), ("met_ns", "i8"),
    ]
)  # fmt: skip
#: What the kernel writes for a stage of a worker (kernels/worker/consumer.h): three times, then lengths of time.
FIELDS = ("began", "arrived", "ended", "multiplied", "starved", "met")
_AFTER_LAYERS = ("head", "sample")


@dataclass(frozen=True, slots=True)
class TraceRecords:
    """The records of a few tokens, and the bytes that they had to read."""

    records: NDArray[Any]  # of RECORD
    stages: tuple[str, ...]  # their names, by number
    stage_bytes: Mapping[str, int]  # what all workers together read for a stage, in all layers of one token


@runtime_checkable
class Traced(Protocol):
    """A backend that can record itself."""

    def trace(self, prompt: Sequence[int], tokens: int) -> TraceRecords:
        """Decodes `tokens` tokens after a prompt, and keeps when each worker did what."""
        ...


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one token, the mean over workers and tokens.

    A worker waits for its input, multiplies, which includes what it waits for pages, waits for its other warps, and
    finishes: it adds up, and publishes.
    """

    stage: str
    time_s: float
    waiting_s: float
    multiplying_s: float
    starved_s: float
    meeting_s: float
    bytes: int
    workers: int  # that took part

    @property
    def finishing_s(self) -> float:
        return self.time_s - self.waiting_s - self.multiplying_s - self.meeting_s

    def streaming_s(self, bandwidth: float) -> float:
        return self.bytes / bandwidth

    def share(self, bandwidth: float) -> float:
        """Share of the ceiling: 1 if the stage took no longer than reading its bytes."""
        return self.streaming_s(bandwidth) / self.time_s if self.time_s else 0.0


def records_of(
    clocks: NDArray[np.int64], layers: int, stages: Sequence[str], stage_bytes: Mapping[str, int]
) -> TraceRecords:
    """From what the kernel writes: [workers][tokens][slots][FIELDS] ns, 0 where nothing happened.

    Slots are the stages of layer 0, of layer 1, ..., then the head and the sampler (kernels/worker/consumer.h).
    """
    per_layer = (clocks.shape[2] - len(_AFTER_LAYERS)) // layers
    assert clocks.shape[2] == layers * per_layer + len(_AFTER_LAYERS)
    layer, stage = np.divmod(np.arange(layers * per_layer), per_layer)
    layer = np.append(layer, [layers] * len(_AFTER_LAYERS))
    stage = np.append(stage, [list(stages).index(name) for name in _AFTER_LAYERS])
    worker, token, slot = np.nonzero((clocks[..., 0] > 0) & (clocks[..., 2] > 0))
    start, arrived, end, multiplied, starved, met = clocks[worker, token, slot].T
    records = np.zeros(worker.size, RECORD)
    records["worker"], records["token"] = worker, token
    records["layer"], records["stage"] = layer[slot], stage[slot]
    records["start_ns"], records["end_ns"] = start, end
    records["waited_ns"] = np.where(arrived > 0, arrived - start, 0)
    records["multiplied_ns"], records["starved_ns"], records["met_ns"] = multiplied, starved, met
    return TraceRecords(records, tuple(stages), stage_bytes)


def stage_bytes_of(plan: Plan, context: int) -> dict[str, int]:
    """Bytes that one token reads in each stage, all layers together."""
    rank = plan.ranks[0]
    found = {stage.name: 0 for stage in rank.stages}
    for tape in rank.tapes:
        for segment in tape.layer_segments:
            found[segment.stage] += segment.bytes * plan.layers
        found[tape.head_segment.stage] += tape.head_segment.bytes
    if rank.library is not None:
        for segment in rank.library.segments:
            found[segment.stage] += segment.bytes * rank.library.chosen * plan.layers
    return {**found, "attention": rank.kv.position_bytes * context}


def stage_times(trace: TraceRecords) -> list[StageTime]:
    """One entry a stage, in the order in which a token passes them."""
    records = trace.records
    workers, tokens = (len(np.unique(records[name])) for name in ("worker", "token"))
    found = []
    for number in _in_order(records):
        mine = records[records["stage"] == number]
        scale = 1e-9 / (workers * tokens)
        time = (mine["end_ns"] - mine["start_ns"]).sum() * scale
        waited, multiplied, starved, met = (
            float(mine[part].sum()) * scale for part in ("waited_ns", "multiplied_ns", "starved_ns", "met_ns")
        )
        name = trace.stages[number]
        read = trace.stage_bytes.get(name, 0)
        taking_part = len(np.unique(mine["worker"]))
        found.append(StageTime(name, time, waited, multiplied, starved, met, read, taking_part))
    return found


def _in_order(records: NDArray[Any]) -> list[int]:
    """By the first end of each: a worker without a part of a stage begins the next one and waits before it is done."""
    first = {
        int(number): records["end_ns"][records["stage"] == number].min()
        for number in np.unique(records["stage"])
    }
    return sorted(first, key=lambda number: int(first[number]))


def token_s(trace: TraceRecords) -> float:
    """Seconds from the first worker's start to the last one's end, the mean over tokens."""
    records = trace.records
    lengths = []
    for token in np.unique(records["token"]):
        mine = records[records["token"] == token]
        lengths.append(mine["end_ns"].max() - mine["start_ns"].min())
    return float(np.mean(lengths)) / 1e9


def table(trace: TraceRecords, bandwidth: float) -> str:
    """Where each stage's time went, what reading its bytes takes, and the share of the ceiling; us of one token."""
    times = stage_times(trace)
    whole = token_s(trace)
    read = sum(trace.stage_bytes.values())
    between = max(0.0, whole - sum(item.time_s for item in times))
    lines = [f"{'stage':<14}" + "".join(f" {words:>11}" for words in _COLUMNS)]
    for item in times:
        parts = [getattr(item, name) for name in _PARTS]
        lines.append(_line(item.stage, item.time_s, parts, item.streaming_s(bandwidth)))
    lines.append(_line("between stages", between, [0.0] * len(_PARTS), 0.0))
    sums = [sum(getattr(item, name) for item in times) for name in _PARTS]
    lines.append(_line("token", whole, sums, read / bandwidth))
    return "\n".join(lines)


_COLUMNS = ("time us", "waiting", "multiplying", "for pages", "meeting", "finishing", "streaming", "ceiling")
_PARTS = ("waiting_s", "multiplying_s", "starved_s", "meeting_s", "finishing_s")


def _line(name: str, time: float, parts: Iterable[float], streaming: float) -> str:
    numbers = "".join(f" {1e6 * value:>11.2f}" for value in (time, *parts, streaming))
    return f"{name:<14}{numbers}" + (f" {100 * streaming / time:>10.1f}%" if streaming else "")


def write_chrome(trace: TraceRecords, file: TextIO) -> None:
    """The trace event format: a row a worker, a bar a stage, and inside it what the worker waited."""
    file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
    for number, event in enumerate(_events(trace)):
        file.write((",\n" if number else "") + json.dumps(event))
    file.write("\n]}\n")


def _events(trace: TraceRecords) -> Iterator[dict[str, Any]]:
    records = trace.records
    for worker in np.unique(records["worker"]).tolist():
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": worker,
            "args": {"name": f"worker {worker}"},
        }
    origin = int(records["start_ns"].min()) if records.size else 0
    for worker, token, layer, stage, start, waited, end, *_ in records.tolist():
        bar = {"ph": "X", "pid": 0, "tid": worker, "ts": (start - origin) / 1e3}
        yield {
            **bar, "name": trace.stages[stage], "dur": (end - start) / 1e3,
            "args": {"token": token, "layer": layer, "waited_ns": waited},
        }  # fmt: skip
        if waited > 0:
            yield {**bar, "name": "wait", "dur": waited / 1e3}
