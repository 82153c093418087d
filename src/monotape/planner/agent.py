"""How long an agent's whole loop takes at different decode speeds: prefill of what is new, decode, and tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monotape.errors import UsageError
from monotape.planner.box import Box
from monotape.planner.catalogue import table
from monotape.planner.engines import Engine
from monotape.planner.load import Load
from monotape.planner.prefill import Prefill, prefill_seconds
from monotape.planner.request import MAX_TOKENS, decode_seconds

SPEEDS = (30, 100, 300, 1000, 3000)  # tokens a second, beside the engine's own
MAX_STEPS = 100_000
_SHAPE = '{"name": "...", "steps": [{"prompt": 1200, "output": 300, "tool_s": 2.5}, ...]}'


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: tokens that join the context (a question, a tool's result), tokens of the answer, the tool's time."""

    prompt: int
    output: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of one agent's run."""

    name: str
    steps: tuple[Step, ...]

    @property
    def output(self) -> int:
        return sum(step.output for step in self.steps)

    @property
    def final_context(self) -> int:
        return sum(step.prompt + step.output for step in self.steps)

    @property
    def tool_s(self) -> float:
        return sum(step.tool_s for step in self.steps)


@dataclass(frozen=True, slots=True)
class LoopTime:
    """Seconds of the whole loop at one decode speed."""

    label: str
    tokens_per_second: float  # the mean over the loop
    prefill: float
    decode: float
    tools: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.tools


def read_trace(path: str | None) -> Trace:
    """A trace from a file; without one, the one that comes with the package."""
    if path is None:
        return _trace(table("agent"), "the built-in trace")
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}.", f"A trace looks like {_SHAPE}."
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.", f"A trace looks like {_SHAPE}.") from error
    return _trace(data, path)


def _trace(data: Any, where: str) -> Trace:
    steps = data.get("steps") if isinstance(data, dict) else None
    if not isinstance(steps, list) or not 1 <= len(steps) <= MAX_STEPS:
        raise UsageError(f"{where} lists no steps.", f"A trace looks like {_SHAPE}.")
    found = tuple(_step(step, f"{where}: step {number}") for number, step in enumerate(steps, 1))
    name = data.get("name")
    return Trace(name if isinstance(name, str) else where, found)


def _step(step: Any, where: str) -> Step:
    values = step if isinstance(step, dict) else {}
    prompt, output, tool_s = values.get("prompt"), values.get("output"), values.get("tool_s", 0)
    counts = all(type(value) is int and 0 <= value <= MAX_TOKENS for value in (prompt, output))
    if not counts or type(tool_s) not in (int, float) or not 0 <= tool_s < 1e9:
        raise UsageError(f"{where} is {json.dumps(step)[:120]}.", f"A trace looks like {_SHAPE}.")
    return Step(int(values["prompt"]), int(values["output"]), float(tool_s))


def simulate(trace: Trace, load: Load, box: Box, engine: Engine, prefill: Prefill) -> tuple[LoopTime, ...]:
    """The loop at each of SPEEDS, and on the engine, whose speed falls as the context grows."""
    waiting = own = 0.0
    context = 0
    for step in trace.steps:
        waiting += sum(prefill_seconds(load, box, context, step.prompt, prefill))
        context += step.prompt
        if step.output:
            own += decode_seconds(load, box, engine, context, step.output)
        context += step.output
    found = [
        LoopTime(f"{speed:,} tok/s", float(speed), waiting, trace.output / speed, trace.tool_s)
        for speed in SPEEDS
    ]
    mean = trace.output / own if own else 0.0
    return (*found, LoopTime(f"{engine.title}, predicted", mean, waiting, own, trace.tool_s))


def loop_json(trace: Trace, times: tuple[LoopTime, ...]) -> dict[str, Any]:
    """The loop as one object for programs. Times are seconds."""
    return {
        "trace": trace.name,
        "steps": len(trace.steps),
        "output": trace.output,
        "final_context": trace.final_context,
        "loops": [
            {
                "label": time.label, "tokens_per_second": time.tokens_per_second, "prefill_s": time.prefill,
                "decode_s": time.decode, "tools_s": time.tools, "total_s": time.total,
            }
            for time in times
        ],
    }  # fmt: skip
