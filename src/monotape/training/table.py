"""Trains all runs of a comparison in calls of a few minutes: one trains, the next compiles meanwhile.

A run that has its JSON is done; one that has a checkpoint goes on. So the same command, given again and again,
completes the table, and a call that is cut off costs the minutes since the last checkpoint.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monotape.errors import UsageError
from monotape.training.disk import replace_whole, told_if_full
from monotape.training.evaluation import difference
from monotape.training.settings import ARMS, Settings
from monotape.training.trainer import RESULT

TURN, RESULTS = "turn", "results.json"
AT_ONCE = 2  # processes: one that trains and one that compiles
#: The first is the base of all comparisons; those that say most come first, should time run out.
ORDER = (
    ("tp", 8, 1), ("dtp1-scale", 8, 1), ("ladder", 8, 1), ("dtp2-scale", 8, 1), ("silent", 8, 1), ("tp", 8, 2),
    ("tp", 8, 3), ("dtp1-scale", 4, 1), ("dtp2-scale", 4, 1), ("silent", 4, 1), ("dtp1-sum", 8, 1),
    ("dtp2-sum", 8, 1), ("dtp1-sum", 4, 1), ("dtp2-sum", 4, 1),
)  # fmt: skip
#: Lanes that never differ are one model, however many there are.
LANES_DO_NOT_MATTER = ("tp", "ladder")
#: What an H200 is expected to train, tokens a second, by (arms that never differ, or lanes): for `predicted_s` alone.
EXPECTED_SPEED = {0: 1.4e6, 4: 1.0e6, 8: 0.7e6}
EXPECTED_PAUSE_S = 8.0  # between two runs: evaluation, a checkpoint, the next one's start


@dataclass(frozen=True, slots=True)
class Planned:
    name: str
    settings: Settings


@dataclass(slots=True)
class Outcome:
    """What a call did."""

    done: list[str] = field(default_factory=list)  # all runs that have their JSON
    left: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def planned(base: Settings, order: Iterable[tuple[str, int, int]] = ORDER) -> list[Planned]:
    """The runs: the base's sizes, rates and tokens, each with its arm, lanes and seed."""
    return [
        Planned(f"{arm}-{lanes}-seed{seed}", replace(base, arm=arm, lanes=lanes, seed=seed))
        for arm, lanes, seed in order
    ]


#: Factors of both rates that a probe tries.
RATE_FACTORS = (0.5, 1.0, 2.0)
PROBE_TOKENS = 16_000_000


def probes(base: Settings, tokens: int = PROBE_TOKENS) -> list[Planned]:
    """Short runs of tp whose rates differ, to choose those of the table."""
    return [
        Planned(
            f"rates-x{factor:g}",
            replace(
                base, arm="tp", tokens=tokens, matrix_rate=base.matrix_rate * factor,
                embedding_rate=base.embedding_rate * factor,
            ),
        )
        for factor in RATE_FACTORS
    ]  # fmt: skip


def best_rates(folder: Path) -> dict[str, float]:
    """The rates of the probe with the fewest bits per byte."""
    try:
        found = json.loads((folder / RESULTS).read_text("utf-8"))
        best = min(found.values(), key=lambda result: float(result["validation"]["bits_per_byte"]))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder} has no results of probes ({error!r}).", "Run `probe` first.") from None
    return {name: best["settings"][name] for name in ("matrix_rate", "embedding_rate")}


def predicted_s(runs: Iterable[Planned]) -> float:
    """Seconds on an H200, as expected before any was measured."""
    total = 0.0
    for run in runs:
        apart = run.settings.lanes if run.settings.arm not in LANES_DO_NOT_MATTER else 0
        total += run.settings.tokens / EXPECTED_SPEED.get(apart, EXPECTED_SPEED[8]) + EXPECTED_PAUSE_S
    return total


def train_table(
    runs: Sequence[Planned], corpus: Path, folder: Path, *, seconds: float, device: str, save_every_s: float = 120.0,
    at_once: int = AT_ONCE, keep_trunks: Sequence[str] = (), say: Callable[[str], None] = print,
) -> Outcome:  # fmt: skip
    """Works on the runs that are not done for so many seconds."""
    until = time.time() + seconds
    with told_if_full(folder, "The table"):
        folder.mkdir(parents=True, exist_ok=True)
        _check_folder(runs, folder)
    outcome, waiting = Outcome(), [run for run in runs if not _done(folder / run.name)]
    active: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while waiting or active:
            while waiting and len(active) < at_once and time.time() < until:
                run = waiting.pop(0)
                active[run.name] = _started(
                    run, corpus, folder, until, device, save_every_s, run.name in keep_trunks
                )
            for name, process in list(active.items()):
                if process.poll() is not None:
                    del active[name]
                    if process.returncode:
                        outcome.failed[name] = _last_line(folder / name / "log.txt")
                        say(f"{name}: failed: {outcome.failed[name]}")
                    else:
                        say(_last_line(folder / name / "log.txt"))
            if not active and time.time() >= until:
                break
            time.sleep(0.2)
    finally:
        for process in active.values():
            process.send_signal(signal.SIGINT)  # a run that trains saves first
        for process in active.values():
            process.wait()
    outcome.done = [run.name for run in runs if _done(folder / run.name)]
    outcome.left = [run.name for run in runs if run.name not in outcome.done]
    collect(runs, folder)
    return outcome


def _done(folder: Path) -> bool:
    return (folder / RESULT).is_file()


def _check_folder(runs: Sequence[Planned], folder: Path) -> None:
    """Runs that are done must be of this table: otherwise it would compare what cannot be compared."""
    for run in runs:
        if _done(folder / run.name):
            saved = json.loads((folder / run.name / RESULT).read_text("utf-8"))["settings"]
            for name, value in run.settings.saved().items():
                if saved.get(name) != value:
                    raise UsageError(
                        f"{folder / run.name} has {name} = {saved.get(name)}, and the table asks for {value}.",
                        "Give the table another folder, or the same settings; nothing was changed.",
                    )


def _started(
    run: Planned, corpus: Path, folder: Path, until: float, device: str, save_every_s: float, keep_trunk: bool
) -> subprocess.Popen[bytes]:
    place = folder / run.name
    place.mkdir(exist_ok=True)
    flags = [
        word
        for name, value in run.settings.saved().items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [
        sys.executable, "-m", "monotape.training", "train", "--corpus", str(corpus), "--into", str(place), "--device",
        device, "--until", str(until), "--turn", str(folder / TURN), "--save-every", str(save_every_s), *flags,
        *(["--keep-trunk"] if keep_trunk else []),
    ]  # fmt: skip
    with (place / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _last_line(path: Path) -> str:
    lines = [
        line
        for line in path.read_text("utf-8", errors="replace").splitlines()
        if line.strip() and "hint:" not in line
    ]
    return lines[-1] if lines else ""


def collect(runs: Sequence[Planned], folder: Path) -> dict[str, Any]:
    """All results in one file, which is small enough to travel."""
    found = {
        run.name: json.loads((folder / run.name / RESULT).read_text("utf-8"))
        for run in runs
        if _done(folder / run.name)
    }
    with told_if_full(folder, "The results"):
        replace_whole(folder / RESULTS, lambda path: _write(path, found))
    return found


def _write(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(found) + "\n", "utf-8")


def rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table: bits per byte, what lies between a run and the first TP run, and the spread of TP's seeds."""
    plain = [result for result in results.values() if result["settings"]["arm"] == "tp"]
    if not plain:
        raise UsageError("There is no finished run of tp to compare with.", "It is the first of the table.")
    base = min(plain, key=lambda result: result["settings"]["seed"])
    made = []
    for name, result in results.items():
        settings = result["settings"]
        mean, error = difference(result["validation"], base["validation"])
        made.append(
            {
                "run": name, "arm": settings["arm"], "seed": settings["seed"],
                "lanes": None if settings["arm"] in LANES_DO_NOT_MATTER else settings["lanes"],
                "tokens": result["tokens"], "bits_per_byte": result["validation"]["bits_per_byte"],
                "standard_error": result["validation"]["standard_error"], "more_than_tp": mean, "its_error": error,
                "training_tokens_per_second": result["tokens_per_second"],
            }
        )  # fmt: skip
    return sorted(made, key=lambda row: (list(ARMS).index(row["arm"]), row["lanes"] or 0, row["seed"]))


def noise(table: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The least and the most bits per byte of TP's seeds; None of one seed."""
    values = [row["bits_per_byte"] for row in table if row["arm"] == "tp"]
    return (min(values), max(values)) if len(values) > 1 else None


def text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in Markdown."""
    table = rows(results)
    lines = [
        "| arm | lanes | seed | bits per byte | more than TP, seed 1 | trained, tok/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in table:
        lines.append(
            f"| {row['arm']} | {row['lanes'] or 'any'} | {row['seed']} | {row['bits_per_byte']:.4f} | "
            f"{row['more_than_tp']:+.4f} ± {row['its_error']:.4f} | {row['training_tokens_per_second']:,.0f} |"
        )
    spread = noise(table)
    if spread is not None:
        lines.append(f"\nTP's seeds lie between {spread[0]:.4f} and {spread[1]:.4f} bits per byte.")
    return "\n".join(lines)
