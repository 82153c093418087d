"""The table of replicas for people."""

from __future__ import annotations

from monotape.planner.text import columns, duration
from monotape.planner.users import Sizing


def describe_sizing(sizing: Sizing) -> str:
    traffic = sizing.traffic
    title = f"users: {traffic.users:,}, who send a request {duration(traffic.think_s)} after the last answer"
    service = (
        f"a request takes {duration(traffic.mean_s)} on average (squared variation {traffic.variation:.2f}),"
        f" {sizing.served.source}"
    )
    lines = ["", title, *columns("", service, 2), ""]
    lines.append(
        f"  {'replicas':>8}{'busy':>8}{'M/G/k':>12}{'one queue':>12}{'as routed':>12}{'95 %':>12}{'$/M tokens':>12}"
    )
    for one in sizing.sizes:
        dollars = "-" if one.million_dollars is None else f"{one.million_dollars:,.2f}"
        waits = "".join(
            f"{duration(seconds):>12}" for seconds in (one.formula_s, one.shared_s, one.mean_s, one.p95_s)
        )
        mark = "  <-" if one.replicas == sizing.enough else ""
        lines.append(f"  {one.replicas:>8}{100 * one.busy_share:>6.0f} %{waits}{dollars:>12}{mark}")
    note = (
        "waits before a request begins. M/G/k: the mean by the formula, for one queue that all replicas serve;"
        " one queue: the same, simulated; as routed: simulated with conversations that stay at the replica of"
        f" their KV until {sizing.queue} wait there, which is what users see; 95 %: nineteen of twenty wait no longer"
    )
    lines += ["", *columns("", note, 2)]
    found = (
        f"{sizing.enough} replicas: nineteen of twenty requests wait {duration(sizing.target_s)} at most"
        if sizing.enough is not None
        else f"no number of replicas here keeps the wait of nineteen in twenty at {duration(sizing.target_s)}"
    )
    return "\n".join([*lines, *columns("", found, 2)]) + "\n"
