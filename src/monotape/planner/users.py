"""How many replicas so many users need, how long they wait, and what a million tokens costs then."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monotape.errors import UsageError
from monotape.planner.agent import Trace
from monotape.planner.box import Box
from monotape.planner.engines import Engine
from monotape.planner.load import Load
from monotape.planner.prefill import Prefill, prefill_seconds
from monotape.planner.queue_simulation import Simulation
from monotape.planner.request import Request, decode_seconds, request_time
from monotape.planner.waiting import Traffic, mean_wait_s, percentile

MOST_USERS, MOST_REPLICAS = 10_000, 256
QUEUE = 16  # requests that wait at a replica before its conversations go elsewhere: --max-queue of `monotape deploy`
_ROWS_BEYOND = 2  # replicas above the number that is enough, to show what they would bring
_SHAPE = '{"service_s": [1.9, 0.7, ...], "output_tokens": [212, 80, ...]}'


@dataclass(frozen=True, slots=True)
class Served:
    """How long one replica takes for each of some requests, and the tokens of their answers."""

    source: str
    service_s: tuple[float, ...]
    output_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """What users see with so many replicas."""

    replicas: int
    busy_share: float
    formula_s: float  # mean wait, M/G/k
    shared_s: float  # mean wait, simulated with one queue for all: what the formula describes
    mean_s: float  # mean wait, simulated with conversations that stay at their replica
    p95_s: float
    million_dollars: float | None


@dataclass(frozen=True, slots=True)
class Sizing:
    """The table of sizes, and which one is enough."""

    traffic: Traffic
    served: Served
    target_s: float
    queue: int
    sizes: tuple[Size, ...]
    enough: int | None


def measured(path: str) -> Served:
    """Service times from a file; both lists come from answers of one replica that nothing else kept busy."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
        times = tuple(float(value) for value in data["service_s"])
        tokens = tuple(int(value) for value in data["output_tokens"])
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}.", f"It looks like {_SHAPE}."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} holds no service times.", f"It looks like {_SHAPE}.") from None
    sensible = len(times) == len(tokens) > 0 and all(0 < time < 1e6 for time in times) and min(tokens) >= 0
    if not sensible:
        raise UsageError(
            f"{path} holds no service times that make sense.", f"It looks like {_SHAPE}, both of one length."
        )
    return Served(path, times, tokens)


def predicted(trace: Trace, load: Load, box: Box, engine: Engine, prefill: Prefill) -> Served:
    """Service times of an agent's steps, each with the KV of the steps before it."""
    times, context = [], 0
    for step in trace.steps:
        took = sum(prefill_seconds(load, box, context, step.prompt, prefill))
        context += step.prompt
        took += decode_seconds(load, box, engine, context, step.output) if step.output else 0.0
        context += step.output
        times.append(took)
    source = f"predicted for the steps of '{trace.name}'"
    return Served(source, tuple(times), tuple(step.output for step in trace.steps))


def predicted_request(request: Request, load: Load, box: Box, engine: Engine, prefill: Prefill) -> Served:
    took = request_time(load, box, engine, request, prefill).total
    return Served("predicted for --request", (took,), (request.output,))


def size(
    served: Served, *, users: int, think_s: float, target_s: float, price: float | None, queue: int = QUEUE
) -> Sizing:
    """Adds replicas until 95 % of the requests wait `target_s` at most. `price` is of a replica, dollars an hour."""
    for name, value, low, high in (
        ("--users", users, 1, MOST_USERS), ("--think", think_s, 0, 1e6), ("--wait", target_s, 0, 1e6),
        ("--conversation-queue", queue, 0, 10_000),
    ):  # fmt: skip
        if not low <= value <= high:
            raise UsageError(f"{name} {value:,.10g} makes no sense.", f"Give {low} to {high:,.10g}.")
    if price is not None and not 0 <= price < 1e6:
        raise UsageError(f"--price {price:g} is no hourly price.", "Give dollars an hour, like 3.5.")
    traffic = Traffic(users, think_s, served.service_s)
    most = min(users, MOST_REPLICAS)
    sizes: list[Size] = []
    enough = None
    # Fewer than this would be busy all the time, so every table begins here.
    first = max(1, int(users * traffic.mean_s / (think_s + traffic.mean_s)))
    for replicas in range(min(first, most), most + 1):
        sizes.append(_size(traffic, served, replicas, price, queue))
        if enough is None and sizes[-1].p95_s <= target_s:
            enough = replicas
        if enough is not None and replicas >= enough + _ROWS_BEYOND:
            break
    return Sizing(traffic, served, target_s, queue, tuple(sizes), enough)


def _size(traffic: Traffic, served: Served, replicas: int, price: float | None, queue: int) -> Size:
    shared = Simulation(traffic, replicas, None).run()
    staying = Simulation(traffic, replicas, queue).run()
    tokens_a_second = staying.requests_a_second * statistics.fmean(served.output_tokens)
    dollars = None
    if price is not None and tokens_a_second:
        dollars = price * replicas / 3600 / tokens_a_second * 1e6
    return Size(
        replicas,
        staying.busy_share,
        mean_wait_s(traffic, replicas),
        statistics.fmean(shared.waits_s),
        statistics.fmean(staying.waits_s),
        percentile(staying.waits_s, 0.95),
        dollars,
    )


def sizing_json(sizing: Sizing) -> dict[str, Any]:
    """The sizing as one object for programs. Times are seconds, prices dollars."""
    return {
        "users": sizing.traffic.users,
        "think_s": sizing.traffic.think_s,
        "service": {
            "source": sizing.served.source,
            "mean_s": sizing.traffic.mean_s,
            "squared_variation": sizing.traffic.variation,
        },
        "conversation_queue": sizing.queue,
        "p95_wait_target_s": sizing.target_s,
        "replicas": sizing.enough,
        "sizes": [
            {
                "replicas": one.replicas, "busy_share": one.busy_share, "mean_wait_formula_s": one.formula_s,
                "mean_wait_shared_queue_s": one.shared_s, "mean_wait_s": one.mean_s, "p95_wait_s": one.p95_s,
                "dollars_a_million_output": one.million_dollars,
            }
            for one in sizing.sizes
        ],
    }  # fmt: skip
