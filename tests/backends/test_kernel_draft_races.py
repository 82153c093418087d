"""Races of passes with several rows that the host's machine finds, each with the lines that prevent it.

As in test_kernel_races.py: the known orders are run with the lines, where every token is right, and without them,
where one of them or of forty further ones must go wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from backends.host_drafts import SAMPLINGS, Answer, answer, plain, predicting
from backends.host_kernel import HostKernel, MachineFault, Schedule
from backends.host_setups import CONTEXT, VOCAB, Load, checkpoints, loading_from
from backends.source_edits import Line, late_parts, late_reader, late_sums, late_writer, put
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.protocol import Job
from monotape.errors import DeadlineFault, NumericalFault

pytestmark = pytest.mark.long

TEXT = tuple(np.random.default_rng(11).integers(3, VOCAB, CONTEXT).tolist())
QUIET = Schedule(1)
STALLS = Schedule(1, stalls_per_million=2000, stall_steps=100_000)
MANY_STALLS = Schedule(1, stalls_per_million=8000, stall_steps=40_000)
LATE = Schedule(1, delay_steps=200_000)
BRIEF = Schedule(1, most_steps=20_000_000)  # of a kernel that may not end; it takes three million


@dataclass(frozen=True, slots=True)
class Race:
    """What goes wrong in these orders without the lines, in a request with this share of wrong drafts."""

    setup: str
    line: Line
    orders: tuple[Schedule, ...]
    sampling: str = "greedy"
    wrong: float = 0.3
    prompt: int = 8
    tokens: int = 24
    rest: Line | None = None  # as in test_kernel_races.py
    page: int | None = None  # blocks, where not the plan's own


def orders(like: Schedule, *seeds: int) -> tuple[Schedule, ...]:
    return tuple(replace(like, seed=seed) for seed in seeds)


_OTHER_ROWS = "larger(rows_of(token), rows_of(token - 1)));"  # whose words of the turn before are reset

RACES = {
    # A thread that is ahead writes the rows of the next pass, and another one compares them with what was chosen.
    "rows of the next pass": Race(
        "two workers",
        Line("sampling/offers.h", "  if (!c.meet()) return 0;  // no thread reads the rows before any more\n"),
        orders(BRIEF, 1, 2, 3),
        wrong=0,  # passes with drafts that follow each other: the loop does not change in between
        tokens=40,
        rest=late_reader(warp=5),
    ),
    "rows that are read too early": Race(
        "two workers",
        Line("sampling/offers.h", "  return c.meet() ? rows : 0;\n", "  return rows;\n"),
        orders(BRIEF, 1, 2, 3),
        wrong=0,
        tokens=40,
        rest=late_writer(),
    ),
    # Where there is no room for the parts of all rows, those of a row lie over those of the row before.
    "a part over that of the row before": Race(
        "large head",
        Line(
            "token/attention_rows.h",
            "      if (group + at_once < rows && !c.meet()) return false;  // the next parts lie over these\n",
        ),
        orders(STALLS, 1006, 2, 3),
        wrong=0,
        prompt=130,
    ),
    # Another warp polls the query.
    "a query that is read too early": Race(
        "two workers",
        Line(
            "token/attention_rows.h",
            "    if ((first == 0 || newest) && !c.meet()) return false;  // all queries are there, and the newest keys"
            " and values in their unit\n",
        ),
        orders(QUIET, 1, 2, 3),
    ),
    "parts of rows over sums": Race(
        "two batches",
        Line("token/attention_rows.h", "  if (!c.meet()) return false;  // as in `attend`\n"),
        orders(QUIET, 1, 2),
        wrong=0,
        prompt=100,
        tokens=16,
        rest=late_sums(warp=5),  # its sums lie where the queries of rows go
    ),
    # Tasks of further rows make a worker combine that combines nothing of one row.
    "an input over parts of a further row": Race(
        "many splits",
        Line(
            "token/combine.h",
            "  return worker_number() < kWorkers - rows * kHeads || c.meet();",
            "  return worker_number() < kWorkers - kHeads || c.meet();",
        ),
        orders(QUIET, 1, 2),
        wrong=0,
        prompt=40,
        tokens=12,
        rest=late_parts(worker=3),
    ),
    "candidates of further rows": Race(
        "two workers",
        Line(
            "sampling/elect.h",
            "publish<Buffer::candidates>(*c.params.exchange, c.sample_turn() + 2, row * kWorkers + worker_number(),"
            " not_yet());",
            ";",
        ),
        orders(QUIET, 1, 2, 3),
    ),
    "an old offer": Race(
        "two workers",
        Line(
            "sampling/elect.h",
            "    if (worker_number() == 0) store_word(offer_word(*c.params.exchange, c.head_turn() + 2), not_yet());\n",
        ),
        orders(STALLS, 1, 2, 3),
    ),
    "a turn that another warp has counted on": Race(
        "two workers",
        Line(
            "sampling/elect.h",
            "words_of<Buffer::candidates>(*c.params.exchange, turn) + c.warp() * kWorkers;",
            "words_of<Buffer::candidates>(*c.params.exchange, c.sample_turn()) + c.warp() * kWorkers;",
        ),
        orders(STALLS, 3, 1001, 2),
    ),
    # One thread says whose logits are drawn from; here several warps read them.
    "the logits of the row before": Race(
        "many words",
        Line(
            "monotape.cu",
            "if (!c.meet() || !choose_next(c, first + row)) return 0;",
            "if (!choose_next(c, first + row)) return 0;",
        ),
        orders(MANY_STALLS, 2, 1002, 3),
        sampling="drawn",
        wrong=0,
    ),
    "words of the draw before": Race(
        "two workers",
        Line("monotape.cu", "      if (row > 0) fence_device();  // as between two tokens: see sampling/team.h\n"),
        orders(LATE, 1, 2, 3),
        sampling="drawn",
        wrong=0,
    ),
    # Words of all rows but the first are taken back too.
    "listed words of further rows": Race(
        "two workers",
        Line(
            "exchange/janitor.h",
            "token * kLayers + layer, rows_of(token));",
            "token * kLayers + layer, 1);",
        ),
        orders(QUIET, 1, 2, 3),
    ),
    "other words of further rows": Race(
        "two workers",
        Line("exchange/janitor.h", _OTHER_ROWS, "1);"),
        orders(QUIET, 1, 2, 3),
    ),
    # What the last layer has published is taken back in the next pass, which may have fewer rows.
    "words of a pass with more rows": Race(
        "two workers",
        Line("exchange/janitor.h", _OTHER_ROWS, "rows_of(token));"),
        orders(QUIET, 1, 2, 3),
    ),
    "words of a pass with fewer rows": Race(
        "two workers",
        Line("exchange/janitor.h", _OTHER_ROWS, "rows_of(token - 1));"),
        orders(QUIET, 1, 2, 3),
        wrong=0,
    ),
    # The loops over passes take turns: one leaves what it carries to the other.
    "what a loop leaves off": Race(
        "two workers",
        Line("monotape.cu", "  if (!c.meet()) return false;  // thread 0 has written it\n"),
        orders(QUIET, 1, 2, 3),
    ),
    # A tile of a long input takes several steps, and each step's words are taken off the exchange.
    "a long input that has come in part": Race(
        "direct",
        Line("token/tiles.h", "    if (at_.tile == 0) await_ahead<Odd>(at_.k);\n"),
        orders(QUIET, 1, 2, 3),
        page=16,
    ),
    # Where the next pass begins is known when its drafts have been judged.
    "a position that is not known": Race(
        "two workers",
        Line(
            "worker/ring.h",
            "        if (unknown_ && attention_follows(stage) && !find_position(position)) break;\n",
            "        if (unknown_) position++, unknown_ = false;\n",
        ),
        orders(QUIET, 1, 2, 3),
        wrong=0,
        tokens=40,
    ),
    "a position that may be the last one": Race(
        "two workers",
        Line("worker/ring.h", "unknown_ = found == position, position = found", "unknown_ = false, position = found"),
        orders(STALLS, 1, 2, 3),
        wrong=0,
        tokens=40,
    ),
    # Another unit is copied and attended to by other warps.
    "rows of two units": Race(
        "two workers",
        Line(
            "sampling/offers.h", "(position + rows - 1) / kUnitPositions != position / kUnitPositions || ", ""
        ),
        orders(QUIET, 1),
        wrong=0,
        prompt=25,
    ),
}  # fmt: skip


EXPECTED: dict[tuple[str, str, int, int, int | None], Answer] = {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def load(place: Path) -> Iterator[Load]:
    with loading_from(place) as load:
        yield load


def request_of(race: Race) -> Job:
    return Job(TEXT[: race.prompt], 0, race.tokens, **SAMPLINGS[race.sampling])


def expected_of(race: Race, load: Load) -> Answer:
    """Computed once for all races with the same request."""
    request = (race.setup, race.sampling, race.prompt, race.tokens, race.page)
    if request not in EXPECTED:
        EXPECTED[request] = answer(load(race.setup, race.page, 4), plain(request_of(race)))
    return EXPECTED[request]


def answer_in(order: Schedule, backend: CudaBackend, race: Race, expected: Answer) -> Answer:
    HostKernel.schedule = order
    return answer(backend, predicting(request_of(race), expected.ids, race.wrong, VOCAB))


#: A race of each request and its orders: with all lines in place, races that have the same ones are the same run.
DIFFERENT = list({replace(race, line=Line("", "")): name for name, race in RACES.items()}.values())


@pytest.mark.wide
@pytest.mark.parametrize("name", DIFFERENT)
def test_every_order_gives_the_same_tokens(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    race = RACES[name]
    expected = expected_of(race, load)
    if race.rest is not None:
        put(race.rest, tmp_path, monkeypatch)
    backend = load(race.setup, race.page, 4)
    for order in race.orders:
        got = answer_in(order, backend, race, expected)
        assert got.told == expected.told and got.accepted > 0


@pytest.mark.parametrize("name", RACES)
def test_without_its_lines_an_order_goes_wrong(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    race = RACES[name]
    expected = expected_of(race, load)
    for line in (race.rest, race.line):
        if line is not None:
            put(line, tmp_path, monkeypatch)
    backend = load(race.setup, race.page, 4)
    backend._params.deadline_ns = 20_000_000
    assert any(
        goes_wrong(order, backend, race, expected) for order in itertools.chain(race.orders, further(race))
    )


def further(race: Race) -> Iterator[Schedule]:
    """Orders of the same kind, for a kernel that has changed since the known ones were found."""
    return (replace(race.orders[-1], seed=seed) for seed in range(1000, 1040))


def goes_wrong(order: Schedule, backend: CudaBackend, race: Race, expected: Answer) -> bool:
    try:
        return answer_in(order, backend, race, expected).told != expected.told
    except (DeadlineFault, NumericalFault, MachineFault):
        return True
