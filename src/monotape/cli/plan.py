"""Say how fast a model can run for one user on a machine, and what it would cost; needs no GPU.

Longer than other commands because it has some thirty options, each with its help.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monotape.cli.options import integer, real
from monotape.errors import UsageError

if TYPE_CHECKING:
    from monotape.planner.estimate import Estimate
    from monotape.planner.prefill import Prefill

PLOTS = (".svg", ".png", ".html")
_USUAL = {"think": 30.0, "wait": 2.0, "conversation_queue": 16, "concurrency": 16, "stack_concurrency": 64}
#: Options that change nothing unless one of the others is given.
_NEEDED = {
    "price": ("request", "users"),
    "concurrency": ("request",),
    "stack_concurrency": ("request",),
    "stack_us": ("request",),
    "think": ("users",),
    "wait": ("users",),
    "service_times": ("users",),
    "conversation_queue": ("users",),
    "prefill_rows": ("request", "agent", "users"),
    "prefill_share": ("request", "agent", "users"),
    "cache_bandwidth": ("request", "agent", "users"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", default="llama-3.1-8b",
        help="a built-in name, a folder, a config.json, a GGUF file or a hub id (default: %(default)s)")  # fmt: skip
    add("--gpu", default="h200", metavar="NAME", help="see --list (default: %(default)s)")
    add("--count", type=integer, default=1, metavar="N", help="devices (default: 1)")
    add(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="weights: auto, bf16, fp16, fp8, int4, mxfp4, q8, f32, int4-g128, q4_k, ...",
    )
    add("--head-dtype", default="auto", metavar="TYPE", help="the head's weights (default: as --dtype)")
    add("--kv-dtype", default="bf16", metavar="TYPE", help="KV cache: bf16, fp16, fp8, f32")
    add(
        "--context",
        type=integer,
        metavar="N",
        help="tokens before this one (default: 4096, or the model's own context where that is shorter)",
    )
    add("--engine", default="monotape", metavar="NAME", help="monotape, vllm, launches, graphs, cpu or share")
    add("--mbu", type=real, metavar="SHARE", help="predict this share of the effective bandwidth, like 0.36")
    add(
        "--kernels",
        type=integer,
        default=10,
        metavar="K",
        help="kernels a layer, for the launch tax (default: 10)",
    )
    own = parser.add_argument_group("your own figures, for one device")
    own.add_argument("--bandwidth", type=real, metavar="TB/S", help="measured read bandwidth")
    own.add_argument("--memory", type=real, metavar="GB", help="memory")
    own.add_argument("--link-us", type=real, metavar="US", help="one small sum over all devices")
    own.add_argument("--launch-us", type=real, metavar="US", help="one kernel launch")
    _add_request_arguments(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one object")
    out.add_argument("--plot", metavar="FILE", help="draw it: .svg, .png or .html (needs matplotlib)")
    out.add_argument(
        "--reports",
        metavar="DIR",
        help="measured points of this engine (default: those that came with this version)",
    )
    out.add_argument("--list", action="store_true", help="list the GPUs and models that are built in")
    out.add_argument(
        "--projections",
        action="store_true",
        help="check the speeds of MoE models that Kog projected, a company that sells inference for one user",
    )


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what a request or an agent costs")
    add = group.add_argument
    add("--request", metavar="TOKENS", help="like prompt=8000,cached=7000,output=2000")
    add(
        "--agent",
        metavar="TRACE",
        nargs="?",
        const="",
        help="the loop of an agent: a JSON file, or the built-in trace",
    )
    add(
        "--users",
        type=integer,
        metavar="N",
        help="how many replicas these users need; each request is --request, or a step of --agent's trace",
    )
    add(
        "--think",
        type=real,
        default=_USUAL["think"],
        metavar="S",
        help="seconds between an answer and a user's next request (default: 30)",
    )
    add(
        "--wait",
        type=real,
        default=_USUAL["wait"],
        metavar="S",
        help="seconds that 95 %% of the requests may wait (default: 2)",
    )
    add(
        "--service-times",
        metavar="FILE",
        help="measured seconds of requests for --users, instead of predicted ones",
    )
    add(
        "--conversation-queue",
        type=integer,
        default=_USUAL["conversation_queue"],
        metavar="N",
        help="requests that wait at a replica before its conversations go to others (default: 16)",
    )
    add("--price", type=real, metavar="DOLLARS", help="an hour of one device")
    add(
        "--concurrency",
        type=integer,
        default=_USUAL["concurrency"],
        metavar="N",
        help="users at once on this engine (default: 16)",
    )
    add(
        "--stack-concurrency",
        type=integer,
        default=_USUAL["stack_concurrency"],
        metavar="N",
        help="users at once on vLLM, the throughput stack that --request compares with (default: 64)",
    )
    add(
        "--stack-us",
        type=real,
        metavar="US",
        help="time a layer that vLLM does not hide (default: as measured)",
    )
    add(
        "--prefill-rows",
        type=integer,
        metavar="N",
        help="tokens a prefill pass (default: 2048; on a CPU 128)",
    )
    add(
        "--prefill-share",
        type=real,
        metavar="SHARE",
        help="of the dense peak that prefill reaches on this engine (default: as measured)",
    )
    add(
        "--cache-bandwidth",
        type=real,
        metavar="GB/S",
        help="where cached KV is read from; default: device memory",
    )


def main(options: argparse.Namespace) -> int:
    if options.list:
        return _list(options.json)
    if options.projections:
        return _projections(options.json)
    _check_effects(options)
    found = _estimate(options)
    sections, data = _sections(options, found)
    if options.plot is not None:
        _plot(options, found)
    print(json.dumps(data) if options.json else sections, end="\n" if options.json else "")
    return 0


def _check_effects(options: argparse.Namespace) -> None:
    """Refuses a price that is none, and options without the one that they belong to."""
    from monotape.planner.request import check_price

    check_price(options.price)
    for name, needed in _NEEDED.items():
        if getattr(options, name) == _USUAL.get(name) or any(
            getattr(options, other) is not None for other in needed
        ):
            continue
        flag = f"--{name.replace('_', '-')}"
        wanted = " or ".join(f"--{other}" for other in needed)
        raise UsageError(f"{flag} has no effect without {wanted}.", f"Give {wanted}, or leave {flag} out.")


def _estimate(options: argparse.Namespace) -> Estimate:
    from monotape.planner.estimate import estimate

    return estimate(
        options.model,
        gpu=options.gpu,
        count=options.count,
        dtype=options.dtype,
        head_dtype=options.head_dtype,
        kv_dtype=options.kv_dtype,
        context=options.context,
        engine=options.engine,
        mbu=options.mbu,
        bandwidth_tbs=options.bandwidth,
        memory_gb=options.memory,
        link_us=options.link_us,
        launch_us=options.launch_us,
        kernels_per_layer=options.kernels,
        reports=None if options.reports is None else Path(options.reports),
    )


def _sections(options: argparse.Namespace, found: Estimate) -> tuple[str, dict[str, Any]]:
    """The answer as text and as data: the estimate, then request, agent and users, as far as they are asked for."""
    from monotape.planner.estimate import as_json
    from monotape.planner.text import describe

    text, data = describe(found), as_json(found)
    parts = (
        ("request", options.request, _request), ("agent", options.agent, _agent), ("users", options.users, _users)
    )  # fmt: skip
    for name, asked, section in parts:
        if asked is not None:
            if found.fit.fits is False:
                more_text, more_data = (
                    f"\n{name}: no times and no prices, because the model does not fit\n",
                    {name: None},
                )
            else:
                more_text, more_data = section(options, found)
            text += more_text
            data |= more_data
    return text, data


def _prefill(options: argparse.Namespace, found: Estimate) -> Prefill:
    from monotape.planner.prefill import prefill_for

    bandwidth = options.cache_bandwidth
    return prefill_for(
        found.engine,
        found.box,
        rows=options.prefill_rows,
        share=options.prefill_share,
        cache_bandwidth=None if bandwidth is None else bandwidth * 1e9,
    )


def _request(options: argparse.Namespace, found: Estimate) -> tuple[str, dict[str, Any]]:
    from monotape.planner.engines import throughput_engine
    from monotape.planner.estimate import check_context
    from monotape.planner.prefill import prefill_assumption, prefill_for
    from monotape.planner.request import cost, costing_json, parse_request
    from monotape.planner.tables import describe_costing

    request = parse_request(options.request)
    check_context(request.prompt + request.output, found.shape, found.source.name, "--request")
    if options.stack_us is not None and not 0 <= options.stack_us < 1e6:
        raise UsageError(
            f"--stack-us {options.stack_us:g} is no time a layer.", "Give microseconds, like 54."
        )
    stack, prefill = throughput_engine(options.stack_us), _prefill(options, found)
    stack_prefill = prefill_for(
        stack, found.box, rows=options.prefill_rows, cache_bandwidth=prefill.cache_bandwidth
    )
    costing = cost(
        found.load, found.box, found.engine, stack, request, prefill, stack_prefill,
        users=options.concurrency, stack_users=options.stack_concurrency, price=options.price,
    )  # fmt: skip
    decode, assumption = stack.assumption(found.load, found.box), prefill_assumption(prefill, found.box)
    both = f"{decode}; {prefill_assumption(stack_prefill, found.box)}"
    return describe_costing(costing, assumption, both, found.engine.title), {
        "request": costing_json(costing, prefill, stack_prefill, decode)
    }


def _agent(options: argparse.Namespace, found: Estimate) -> tuple[str, dict[str, Any]]:
    from monotape.planner.agent import loop_json, read_trace, simulate
    from monotape.planner.estimate import check_context
    from monotape.planner.tables import describe_loop

    trace = read_trace(options.agent or None)
    check_context(trace.final_context, found.shape, found.source.name, "--agent")
    times = simulate(trace, found.load, found.box, found.engine, _prefill(options, found))
    return describe_loop(trace, times), {"agent": loop_json(trace, times)}


def _users(options: argparse.Namespace, found: Estimate) -> tuple[str, dict[str, Any]]:
    from monotape.planner.agent import read_trace
    from monotape.planner.request import parse_request
    from monotape.planner.users import measured, predicted, predicted_request, size, sizing_json
    from monotape.planner.users_text import describe_sizing

    machine = (found.load, found.box, found.engine, _prefill(options, found))
    if options.service_times is not None:
        served = measured(options.service_times)
    elif options.request is not None:
        served = predicted_request(parse_request(options.request), *machine)
    else:
        served = predicted(read_trace(options.agent or None), *machine)
    price = None if options.price is None else options.price * options.count
    sizing = size(
        served,
        users=options.users,
        think_s=options.think,
        target_s=options.wait,
        price=price,
        queue=options.conversation_queue,
    )
    return describe_sizing(sizing), {"users": sizing_json(sizing)}


def _plot(options: argparse.Namespace, found: Estimate) -> None:
    path = Path(options.plot)
    if path.suffix not in PLOTS:
        raise UsageError(
            f"--plot cannot draw {path.suffix or 'a file without an ending'}.", f"Use {', '.join(PLOTS)}."
        )
    from monotape.planner.plot import draw
    from monotape.planner.reports import load_reports

    reports = {} if options.reports is None else load_reports(Path(options.reports))
    draw(found, reports, path)


def _list(as_object: bool) -> int:
    from monotape.planner.listing import list_json, list_text

    print(json.dumps(list_json()) if as_object else list_text(), end="\n" if as_object else "")
    return 0


def _projections(as_object: bool) -> int:
    from monotape.planner.projections import projections, projections_json
    from monotape.planner.tables import describe_projections

    rows = projections()
    print(
        json.dumps(projections_json(rows)) if as_object else describe_projections(rows),
        end="\n" if as_object else "",
    )
    return 0
