"""Sums of small vectors over ranks that share one GPU, beside a plain barrier of all blocks, and NCCL where it can run.

    python bench/collective.py --ranks 2,4,8 --kilobytes 1,2,5,10,20 --save

Every round is timed in the kernel, by the clock of each multiprocessor, and counts as long as the slowest block took
for it. Ranks on one chip meet in its L2: what this measures is the method, without a link between GPUs.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from itertools import pairwise
from typing import Any

from machine_code import evidence
from measuring import integers, short_name
from monotape.backends.cuda.collective import Collective, Rounds
from monotape.backends.cuda.driver import device_count, device_name
from recipes import COLLECTIVE_FILE, Recipe
from report import publish


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=integers, default=[2, 4, 8])
    parser.add_argument("--kilobytes", type=integers, default=[1, 2, 5, 10, 20])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    return parser.parse_args()


def row(what: str, ranks: int, kilobytes: int | None, times: Rounds) -> dict[str, Any]:
    return {
        "what": what, "ranks": ranks, "kilobytes": kilobytes,
        "p50_us": round(times.percentile(50), 3), "p99_us": round(times.percentile(99), 3),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for ranks in options.ranks:
        collective = Collective(ranks)
        for kilobytes in options.kilobytes:
            rows.append(row("sum", ranks, kilobytes, collective.sum(kilobytes * 256, options.rounds)))
        rows.append(row("barrier", ranks, None, collective.barrier(options.rounds)))
    return rows


def nccl_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same sums by NCCL, between GPUs; none where there is only one."""
    devices = device_count()
    if devices < 2:
        return []
    torch: Any = import_module("torch")
    nccl: Any = import_module("torch.cuda.nccl")
    rows = []
    for ranks in (count for count in options.ranks if count <= devices):
        for kilobytes in options.kilobytes:
            values = [torch.ones(kilobytes * 256, device=f"cuda:{index}") for index in range(ranks)]
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(501)]
            for mark in marks:
                mark.record()
                nccl.all_reduce(values, outputs=values)
            torch.cuda.synchronize()
            lengths = sorted(1e3 * one.elapsed_time(other) for one, other in pairwise(marks[100:]))
            half, most = lengths[len(lengths) // 2], lengths[int(0.99 * (len(lengths) - 1))]
            rows.append(
                {"what": "nccl", "ranks": ranks, "kilobytes": kilobytes, "p50_us": half, "p99_us": most}
            )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'':<8} {'ranks':>5} {'KB':>4} {'p50 us':>8} {'p99 us':>8}")
    for found in rows:
        size = "" if found["kilobytes"] is None else str(found["kilobytes"])
        print(
            f"{found['what']:<8} {found['ranks']:>5} {size:>4} {found['p50_us']:>8.2f} {found['p99_us']:>8.2f}"
        )


def main() -> None:
    options = parse_arguments()
    rows = measure(options) + nccl_rows(options)
    print_table(rows)
    if device_count() < 2:
        print("NCCL needs several GPUs; this machine has one.")
    gpu = short_name(device_name())
    kernels = evidence(Recipe(source=COLLECTIVE_FILE, ranks=ranks) for ranks in options.ranks)
    facts = {"gpu": gpu, "gpus": device_count(), **kernels, "results": rows}
    publish(f"collective-{gpu}", facts, save=options.save)


if __name__ == "__main__":
    main()
