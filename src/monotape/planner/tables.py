"""Requests, agents' loops and projections for people: tables with fixed columns, the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from monotape.planner.agent import LoopTime, Trace
from monotape.planner.projections import GPUS, Projection
from monotape.planner.request import MARKET, Costing, Offer
from monotape.planner.text import columns, duration, speed


def _table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """The first column to the left, the others to the right."""
    return [
        f"{row[0]:<{widths[0]}}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def describe_costing(costing: Costing, assumption: str, stack_assumption: str, engine: str) -> str:
    """Where a request's time goes on the engine of that title, and what it costs."""
    request, time = costing.request, costing.offers[0].time
    title = f"request: {request.prompt:,} prompt tokens, {request.cached:,} of them cached, {request.output:,} output"
    if costing.offers[0].fits is False:
        return "\n".join(["", *columns("", f"{title}: it does not fit with this context", 0)]) + "\n"
    lines = ["", title, *columns("", f"this engine: {engine}", 2), ""]
    for name, seconds in (
        ("cache read", time.cache_read), ("prefill extend", time.prefill_extend), ("decode", time.decode),
        ("total", time.total),
    ):  # fmt: skip
        lines.append(f"  {name:<16}{duration(seconds):>12} {100 * seconds / time.total:>6.1f} %")
    lines += ["", *columns("", _left_to_gain(costing), 2)]
    lines += columns("", f"assumption: {assumption}", 2)
    return "\n".join([*lines, "", *_offers(costing, stack_assumption)]) + "\n"


def _left_to_gain(costing: Costing) -> str:
    share = costing.decode_share
    whole = f"decode is {100 * share:.1f} % of the time, and that is what decode speed can still improve"
    if share == 1:
        return whole
    return (
        f"{whole}: at the speed of light the request ends {costing.best_speedup:.2f}x as fast, with decode for nothing"
        f" {1 / (1 - share):.2f}x"
    )


def _money(value: float | None) -> str:
    if value is None:
        return "-"
    return f"${value:,.2f}" if value >= 0.01 else f"${value:.6f}"


def _offers(costing: Costing, stack_assumption: str) -> list[str]:
    offers: tuple[Offer, ...] = costing.offers

    def row(name: str, show: Callable[[Offer], str]) -> tuple[str, ...]:
        """What does not fit has no speed and no price."""
        return (name, *("-" if offer.fits is False else show(offer) for offer in offers))

    introduced = (
        f"beside this engine stands a stack tuned for throughput, vLLM: {stack_assumption}; --stack-concurrency and"
        " --stack-us change it"
    )
    rows = [
        ("", *(offer.name for offer in offers)),
        row("tok/s a user", lambda offer: speed(offer.user_speed)),
        row("tok/s in all", lambda offer: speed(offer.user_speed * offer.users)),
        row("seconds a request", lambda offer: f"{offer.time.total:.3f}"),
        row("$ a million output", lambda offer: _money(offer.million_dollars)),
        row("$ a request", lambda offer: _money(offer.request_dollars)),
        (
            "memory",
            *("-" if offer.fits is None else "fits" if offer.fits else "DOES NOT FIT" for offer in offers),
        ),
    ]
    lines = [*columns("", introduced, 2), "", *_table(rows, (26, *(18 for _ in offers)))]
    if offers[0].hourly_price is None:
        lines += columns("", "give --price, dollars an hour for one device, to see dollars", 2)
    return lines + (["", *columns("", _answer(costing), 2)] if costing.comparable else [])


def _answer(costing: Costing) -> str:
    fast, low, high = MARKET
    return (
        f"one user on this engine gets {costing.speed_ratio:.1f}x the speed of vLLM at {costing.price_ratio:.1f}x its"
        f" price a token; the market asks for {fast}x the speed at {low}x to {high}x the price (SemiAnalysis, 31 May"
        " 2026)"
    )


def describe_loop(trace: Trace, times: Sequence[LoopTime]) -> str:
    """The agent's loop at each speed."""
    title = (
        f"agent: {trace.name}: {len(trace.steps)} steps, {trace.output:,} output tokens, context grows to"
        f" {trace.final_context:,}, tools take {duration(trace.tool_s)}"
    )
    base = next(time for time in times if time.tokens_per_second == 100).total
    rows: list[tuple[str, ...]] = [("decode speed", "prefill", "decode", "tools", "the loop", "against 100")]
    for time in times:
        label = (
            time.label if "tok/s" in time.label else f"{time.label} ({speed(time.tokens_per_second)} tok/s)"
        )
        seconds = (time.prefill, time.decode, time.tools, time.total)
        rows.append((label, *map(duration, seconds), f"{base / time.total:.2f}x"))
    return "\n".join(["", *columns("", title, 0), "", *_table(rows, (42, 12, 14, 14, 14, 14))]) + "\n"


def describe_projections(found: Sequence[Projection]) -> str:
    """Kog's table, row by row, and whether each row follows."""
    lines = [
        "Kog, a company that sells inference for one user, projected these speeds of MoE models (blog.kog.ai,",
        "28 May 2026) at 36 % of the effective bandwidth of eight GPUs. What follows from sizes and configs:",
        "",
    ]
    lines += _table([("", "claimed", "stated size", "config")], (52, 10, 13, 10))
    for one in found:
        lines += _table(
            [(f"{one.label}, 8x {one.gpu}", speed(one.claimed), speed(one.nominal), speed(one.configured))],
            (52, 10, 13, 10),
        )
        if one.gpu == GPUS[-1]:
            lines += columns("", one.verdict + (f"; {one.note}" if one.note else ""), 4)
    return "\n".join(lines) + "\n"
